// cuBLAS whose every call succeeds and computes nothing. Its own header is not used: each call is found by its name
// alone, and those that only return success read none of their arguments.
//
// A call that is not here reaches the real library, which finds no card and says so.

#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))
#define SUCCEEDS(name) \
    API int name() { return success; }

namespace {

constexpr int success = 0;  // CUBLAS_STATUS_SUCCESS
char handle[64];            // what every handle points to; nothing reads it

int give_handle(void** target) {
    *target = handle;
    return success;
}

int give_zero(int* target) {
    *target = 0;
    return success;
}

}  // namespace

// ---- the library ----

API int cublasCreate_v2(void** target) { return give_handle(target); }
API int cublasGetMathMode(void*, int* mode) { return give_zero(mode); }
API int cublasGetPointerMode_v2(void*, int* mode) { return give_zero(mode); }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)

// ---- products and triangular systems ----

SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasDgemv_v2)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasDdot_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasStrsm_v2)
SUCCEEDS(cublasDtrsm_v2)
SUCCEEDS(cublasStrsmBatched)
SUCCEEDS(cublasDtrsmBatched)

// ---- cublasLt ----

API int cublasLtMatmulDescCreate(void** target, int, int) { return give_handle(target); }
API int cublasLtMatmulPreferenceCreate(void** target) { return give_handle(target); }
API int cublasLtMatrixLayoutCreate(void** target, int, unsigned long, unsigned long, long) {
    return give_handle(target);
}
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)

// One way to multiply is found, whatever is asked.
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
    *found = 1;
    return success;
}
