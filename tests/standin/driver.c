/* libcuda.so.1: what torch's library of kernels made at run time wants to find when it is loaded. Nothing is done. */

#define SUCCEEDS(name) \
    int name(void) { return 0; }

/* ---- questions that have an answer ---- */

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "an error of the stand-in for CUDA";
    return 0;
}

/* Torch asks whether a device is in use already before it would start it: it is. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    static char the_only_one;
    *context = &the_only_one;
    return 0;
}

/* ---- calls that only succeed ---- */

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuDeviceGetAttribute)
SUCCEEDS(cuDevicePrimaryCtxRetain)
SUCCEEDS(cuFuncGetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuModuleGetFunction)
SUCCEEDS(cuModuleLoad)
SUCCEEDS(cuModuleLoadData)
SUCCEEDS(cuModuleLoadDataEx)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(cuPointerGetAttribute)
SUCCEEDS(cuTensorMapEncodeTiled)
