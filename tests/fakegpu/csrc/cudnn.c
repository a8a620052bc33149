// Preloaded before the real cuDNN, which then plans for a device that is not there: where a graph
// or a plan would take a handle's device, it takes the device property of $FAKEGPU_DEVICE (cuDNN
// 9.8 and later). Heuristics, checks and compilation are cuDNN's own; a plan that would be run is
// logged.
#define _GNU_SOURCE
#include <cudnn.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include "fake.h"

static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(getenv("FAKEGPU_CUDNN"), RTLD_LAZY);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "fakegpu: FAKEGPU_CUDNN has no %s\n", name);
        abort();
    }
    return function;
}
#define REAL(name) ((typeof(&name))real(#name))

static cudnnBackendDescriptor_t device_property(void) {
    static cudnnBackendDescriptor_t made;
    if (made) return made;
    static char text[8192];
    FILE *file = fopen(getenv("FAKEGPU_DEVICE"), "r");
    int64_t size = file ? (int64_t)fread(text, 1, sizeof text, file) : 0;
    cudnnBackendDescriptor_t property;
    if (REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &property) ||
        REAL(cudnnBackendSetAttribute)(property, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                       CUDNN_TYPE_CHAR, size, text) ||
        REAL(cudnnBackendFinalize)(property)) {
        fprintf(stderr, "fakegpu: cuDNN rejects the device property\n");
        abort();
    }
    return made = property;
}

static __thread cudaStream_t now;
cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = calloc(1, 4096);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    now = stream;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    *stream = now;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count,
                                       const void *elements) {
    if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
    cudnnStatus_t status =
        REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, elements);
    int place = name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH ? CUDNN_ATTR_ENGINEHEUR_DEVICEPROP
                : name == CUDNN_ATTR_ENGINE_OPERATION_GRAPH   ? CUDNN_ATTR_ENGINE_DEVICEPROP
                                                              : 0;
    if (status || !place) return status;
    cudnnBackendDescriptor_t property = device_property();
    return REAL(cudnnBackendSetAttribute)(descriptor, place, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                          &property);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
    int64_t workspace = -1, count;
    REAL(cudnnBackendGetAttribute)(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                   CUDNN_TYPE_INT64, 1, &count, &workspace);
    LOG("launch %d 1,1,1 1 0 cudnn workspace=%ld", number_of(now), (long)workspace);
    return CUDNN_STATUS_SUCCESS;
}
