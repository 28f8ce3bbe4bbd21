// One card, an A100 by its figures, whose kernels do nothing.
//
// Faithful: that there is one device, and the limits by which torch chooses the shape of a launch.
// Not faithful: no kernel runs, so what one should have written stays what it was; no call fails later than it is made.

#include "standin.h"

#include <cstdio>
#include <cstring>
#include <utility>

namespace {

constexpr int version = 13000;  // of driver and runtime: CUDA 13.0
constexpr int major = 8, minor = 0;
constexpr int multiprocessors = 108, warp = 32;
constexpr int threads_per_block = 1024, threads_per_multiprocessor = 2048, blocks_per_multiprocessor = 32;
constexpr int registers = 65536;
constexpr int shared_bytes = 48 << 10, shared_optin_bytes = 163 << 10, shared_multiprocessor_bytes = 164 << 10;
constexpr int l2_bytes = 40 << 20;
constexpr int grid_x = 2147483647, grid_yz = 65535;
constexpr int greatest_priority = -5;

}  // namespace

// ---- errors ----

namespace {

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t failed(cudaError_t code) { return last_error = code; }

cudaError_t refuse(cudaError_t code, const std::string& why) {
    std::fprintf(stderr, "stand-in for CUDA: %s\n", why.c_str());
    return failed(code);
}

API const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in for CUDA"; }

API const char* cudaGetErrorString(cudaError_t code) {
    thread_local char text[64];
    std::snprintf(text, sizeof text, "refused by the stand-in for CUDA, code %d", int(code));
    return text;
}

// Torch asks after each launch: an error that nobody looked at fails whatever the thread does next.
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

// ---- the device ----

namespace {

cudaError_t give(int* target, int value) {
    *target = value;
    return cudaSuccess;
}

}  // namespace

API cudaError_t cudaGetDeviceCount(int* count) { return give(count, 1); }
API cudaError_t cudaGetDevice(int* device) { return give(device, 0); }
API cudaError_t cudaSetDevice(int) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* found) { return give(found, version); }
API cudaError_t cudaRuntimeGetVersion(int* found) { return give(found, version); }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return give(can, 0); }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = greatest_priority;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int) {
    std::snprintf(name, size, "0000:00:00.0");
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: return give(value, major);
        case cudaDevAttrComputeCapabilityMinor: return give(value, minor);
        case cudaDevAttrMultiProcessorCount: return give(value, multiprocessors);
        case cudaDevAttrWarpSize: return give(value, warp);
        case cudaDevAttrMaxThreadsPerBlock: return give(value, threads_per_block);
        case cudaDevAttrMaxThreadsPerMultiProcessor: return give(value, threads_per_multiprocessor);
        case cudaDevAttrMaxBlocksPerMultiprocessor: return give(value, blocks_per_multiprocessor);
        case cudaDevAttrMaxRegistersPerBlock: return give(value, registers);
        case cudaDevAttrMaxSharedMemoryPerBlock: return give(value, shared_bytes);
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return give(value, shared_optin_bytes);
        case cudaDevAttrL2CacheSize: return give(value, l2_bytes);
        case cudaDevAttrMaxGridDimX: return give(value, grid_x);
        case cudaDevAttrMaxGridDimY: return give(value, grid_yz);
        case cudaDevAttrMaxGridDimZ: return give(value, grid_yz);
        default: return give(value, 1);
    }
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* card, int) {
    size_t free = 0;
    *card = {};
    std::strcpy(card->name, "Stand-in for CUDA");
    cudaMemGetInfo(&free, &card->totalGlobalMem);
    card->major = major;
    card->minor = minor;
    card->multiProcessorCount = multiprocessors;
    card->warpSize = warp;
    card->maxThreadsPerBlock = threads_per_block;
    card->maxThreadsPerMultiProcessor = threads_per_multiprocessor;
    card->maxBlocksPerMultiProcessor = blocks_per_multiprocessor;
    card->regsPerBlock = card->regsPerMultiprocessor = registers;
    card->sharedMemPerBlock = shared_bytes;
    card->sharedMemPerBlockOptin = shared_optin_bytes;
    card->sharedMemPerMultiprocessor = shared_multiprocessor_bytes;
    card->l2CacheSize = l2_bytes;
    card->maxThreadsDim[0] = card->maxThreadsDim[1] = threads_per_block;
    card->maxThreadsDim[2] = 64;
    card->maxGridSize[0] = grid_x;
    card->maxGridSize[1] = card->maxGridSize[2] = grid_yz;
    card->textureAlignment = 512;
    card->concurrentKernels = card->unifiedAddressing = card->canMapHostMemory = 1;
    return cudaSuccess;
}

// ---- kernels: never run ----

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return cudaSuccess; }
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* kernel, const void*) {
    *kernel = {};
    kernel->maxThreadsPerBlock = threads_per_block;
    kernel->maxDynamicSharedSizeBytes = shared_bytes;
    kernel->numRegs = warp;
    kernel->ptxVersion = kernel->binaryVersion = 10 * major + minor;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    return give(blocks, 2);
}

// What nvcc makes of `kernel<<<…>>>` asks for the kernel by these two.
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
API char __cudaInitModule(void**) { return 1; }

// ---- variables of kernels: one scrap of memory for all, as nothing reads them ----

API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
    static char scrap[1 << 16];
    *pointer = scrap;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
