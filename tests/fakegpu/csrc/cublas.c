// A cuBLAS that multiplies nothing: a product is logged as a launch on its handle's stream. It is
// built twice, as libcublas and as libcublasLt. What is not here is a stub that the build generates.
#define __CUDA_FP16_H__  // the headers want them for types that no function here has
#define __CUDA_BF16_H__
typedef struct { unsigned short x; } __half;
typedef __half __nv_bfloat16;
#include <cublas_v2.h>
#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>
#include "fake.h"

typedef cublasStatus_t Status;
#define DONE CUBLAS_STATUS_SUCCESS

#ifdef LT
// ---- cublasLt

Status cublasLtCreate(cublasLtHandle_t *handle) { *handle = calloc(1, 64); return DONE; }
Status cublasLtDestroy(cublasLtHandle_t handle) { return DONE; }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

#define OBJECT(Name, type, ...)                                                                  \
    Status cublasLt##Name##Create(type *object, ##__VA_ARGS__) {                                 \
        *object = calloc(1, sizeof **object);                                                    \
        return DONE;                                                                             \
    }                                                                                            \
    Status cublasLt##Name##Destroy(type object) { free(object); return DONE; }
OBJECT(MatmulDesc, cublasLtMatmulDesc_t, cublasComputeType_t compute, cudaDataType_t scale)
OBJECT(MatmulPreference, cublasLtMatmulPreference_t)
OBJECT(MatrixLayout, cublasLtMatrixLayout_t, cudaDataType type, uint64_t rows, uint64_t columns,
       int64_t stride)

Status cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t object,
                                      cublasLtMatmulDescAttributes_t name, const void *value,
                                      size_t size) { return DONE; }
Status cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t object,
                                            cublasLtMatmulPreferenceAttributes_t name,
                                            const void *value, size_t size) { return DONE; }
Status cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t object,
                                        cublasLtMatrixLayoutAttribute_t name, const void *value,
                                        size_t size) { return DONE; }
Status cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t object, size_t size,
                                       cublasComputeType_t compute, cudaDataType_t scale) {
    return DONE;
}
Status cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t object, size_t size) {
    return DONE;
}
Status cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                            cublasLtMatmulAlgoConfigAttributes_t name, void *value,
                                            size_t size, size_t *written) {
    memset(value, 0, size);
    if (written) *written = size;
    return DONE;
}

// One algorithm, without a workspace.
Status cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                      cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                      cublasLtMatmulPreference_t preference, int wanted,
                                      cublasLtMatmulHeuristicResult_t found[], int *count) {
    memset(found, 0, sizeof *found);
    *count = 1;
    return DONE;
}
Status cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha,
                      const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                      cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                      cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                      const cublasLtMatmulAlgo_t *algo, void *workspace, size_t size,
                      cudaStream_t stream) {
    LOG("launch %d 1,1,1 1 0 cublasLtMatmul", number_of(stream));
    return DONE;
}

#else
// ---- cuBLAS

struct cublasContext { cudaStream_t stream; cublasMath_t math; cublasPointerMode_t mode; };

Status cublasCreate_v2(cublasHandle_t *handle) { *handle = calloc(1, 64 * 1024); return DONE; }
Status cublasDestroy_v2(cublasHandle_t handle) { free(handle); return DONE; }
Status cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream) { h->stream = stream; return DONE; }
Status cublasSetWorkspace_v2(cublasHandle_t h, void *memory, size_t size) { return DONE; }
Status cublasSetMathMode(cublasHandle_t h, cublasMath_t mode) { h->math = mode; return DONE; }
Status cublasGetMathMode(cublasHandle_t h, cublasMath_t *mode) { *mode = h->math; return DONE; }
Status cublasSetSmCountTarget(cublasHandle_t h, int count) { return DONE; }
Status cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) {
    h->mode = mode;
    return DONE;
}
Status cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *mode) {
    *mode = h->mode;
    return DONE;
}
const char *cublasGetStatusString(Status status) { return "a status of the fake cuBLAS"; }

// The handle comes first in each of these; the log needs nothing else of them.
#define PRODUCT(name)                                                                            \
    __asm__(".globl " #name "\n.set " #name ", product_" #name);                                 \
    __attribute__((used)) static Status product_##name(cublasHandle_t h) {                       \
        LOG("launch %d 1,1,1 1 0 " #name, number_of(h->stream));                                 \
        return DONE;                                                                             \
    }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemmStridedBatched)
#endif
