/* Stands in for libcuda.so.1, which comes with NVIDIA's driver only: the three functions that NIXL's LIBFABRIC
 * plugin links to. Each says that there is no device (CUDA_ERROR_NO_DEVICE), so the plugin moves host memory. */

enum { NO_DEVICE = 100 };

int cuCtxSetCurrent(void *context)
{
    (void)context;
    return NO_DEVICE;
}

int cuDeviceGetPCIBusId(char *text, int length, int device)
{
    (void)text, (void)length, (void)device;
    return NO_DEVICE;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **values, unsigned long long pointer)
{
    (void)count, (void)attributes, (void)values, (void)pointer;
    return NO_DEVICE;
}
