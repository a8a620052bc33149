// A CUDA runtime with one device that stores and copies but computes nothing. It logs what a
// program asks of it. What is not here is a stub that the build generates.
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "fake.h"

typedef cudaError_t Error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- the log

static int paused;  // while host time is measured

void fakegpu_pause(int pause) { paused = pause; }

void fakegpu_log(const char *format, ...) {
    static FILE *file;
    static int opened;
    if (paused) return;
    pthread_mutex_lock(&lock);
    if (!opened) {
        const char *path = getenv("FAKEGPU_LOG");
        file = path ? fopen(path, "a") : NULL;
        if (file) setvbuf(file, NULL, _IOLBF, 0);
        opened = path != NULL;
    }
    if (file) {
        va_list arguments;
        va_start(arguments, format);
        fprintf(file, "%ld ", (long)syscall(SYS_gettid));
        vfprintf(file, format, arguments);
        fputc('\n', file);
        va_end(arguments);
    }
    pthread_mutex_unlock(&lock);
}

// For Python: a line as it is.
void fakegpu_note(const char *text) { fakegpu_log("%s", text); }

// ---- the device: numbers of the JSON file $FAKEGPU_DEVICE, which cuDNN reads too

static long property(const char *name) {
    static char text[8192];
    if (!text[0]) {
        const char *path = getenv("FAKEGPU_DEVICE");
        FILE *file = path ? fopen(path, "r") : NULL;
        if (!file || !fread(text, 1, sizeof text - 1, file)) {
            fprintf(stderr, "fakegpu: FAKEGPU_DEVICE names no file\n");
            abort();
        }
        fclose(file);
    }
    char key[64];
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(text, key);
    return at ? strtol(at + strlen(key), NULL, 10) : 0;
}

static long attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return property("maxThreadsPerBlock");
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return property("maxSharedMemoryPerBlock");
    case cudaDevAttrWarpSize: return property("warpSize");
    case cudaDevAttrMaxRegistersPerBlock: return property("regsPerBlock");
    case cudaDevAttrClockRate: return property("smClockRateKHz");
    case cudaDevAttrMultiProcessorCount: return property("multiProcessorCount");
    case cudaDevAttrMemoryClockRate: return property("memClockRateKHz");
    case cudaDevAttrL2CacheSize: return property("l2CacheSize");
    case cudaDevAttrMaxThreadsPerMultiProcessor: return property("maxThreadsPerSM");
    case cudaDevAttrComputeCapabilityMajor: return property("deviceVer") / 100;
    case cudaDevAttrComputeCapabilityMinor: return property("deviceVer") / 10 % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return property("maxSharedMemoryPerBlockOptin") + 1024;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return property("maxRegistersPerSM");
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return property("maxSharedMemoryPerBlockOptin");
    case cudaDevAttrMaxBlocksPerMultiprocessor: return property("maxCtasPerSM");
    case cudaDevAttrReservedSharedMemoryPerBlock: return property("reservedSharedMemoryPerBlock");
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: return 1;
    default: return 0;
    }
}

Error cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
Error cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
Error cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
Error cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
Error cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
Error cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = (int)attribute(which);
    return cudaSuccess;
}

Error cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    p->totalGlobalMem = property("totalGlobalMem");
    p->major = attribute(cudaDevAttrComputeCapabilityMajor);
    strcpy(p->name, p->major == 8 ? "fake A100" : p->major == 9 ? "fake H100" : "fake B200");
    p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    p->warpSize = attribute(cudaDevAttrWarpSize);
    p->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
    p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    for (int i = 0; i < 3; i++) {
        p->maxThreadsDim[i] = attribute(cudaDevAttrMaxBlockDimX + i);
        p->maxGridSize[i] = attribute(cudaDevAttrMaxGridDimX + i);
    }
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->streamPrioritiesSupported = p->asyncEngineCount = p->memoryPoolsSupported = 1;
    p->textureAlignment = 512;
    return cudaSuccess;
}

Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
Error cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:01:00.0");
    return cudaSuccess;
}
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

// ---- memory: pages of the host that exist once they are written, so that sizes cost nothing

typedef struct { char *start; size_t size; enum cudaMemoryType kind; } Region;
static Region *regions;
static int num_regions, room_for_regions;
static size_t in_use;

static Error reserve(void **pointer, size_t size, enum cudaMemoryType kind) {
    size = size ? (size + 4095) / 4096 * 4096 : 4096;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    if (num_regions == room_for_regions) {
        room_for_regions = 2 * room_for_regions + 64;
        regions = realloc(regions, room_for_regions * sizeof *regions);
    }
    regions[num_regions++] = (Region){*pointer, size, kind};
    if (kind == cudaMemoryTypeDevice) in_use += size;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static Error release(void *pointer) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_regions; i++) {
        if (regions[i].start != pointer) continue;
        munmap(pointer, regions[i].size);
        if (regions[i].kind == cudaMemoryTypeDevice) in_use -= regions[i].size;
        regions[i] = regions[--num_regions];
        break;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static enum cudaMemoryType kind_of(const void *pointer) {
    enum cudaMemoryType kind = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_regions && kind == cudaMemoryTypeUnregistered; i++) {
        size_t offset = (const char *)pointer - regions[i].start;
        if ((const char *)pointer >= regions[i].start && offset < regions[i].size)
            kind = regions[i].kind;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

Error cudaMalloc(void **pointer, size_t size) {
    Error error = reserve(pointer, size, cudaMemoryTypeDevice);
    LOG("malloc %zu", size);
    return error;
}
Error cudaFree(void *pointer) {
    if (pointer) LOG("free");  // cudaFree(0) makes a context
    return release(pointer);
}
Error cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    return cudaMalloc(pointer, size);
}
Error cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
Error cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    LOG("hostmalloc %zu", size);
    return reserve(pointer, size, cudaMemoryTypeHost);
}
Error cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
Error cudaFreeHost(void *pointer) { return release(pointer); }
Error cudaMemGetInfo(size_t *available, size_t *total) {
    *total = property("totalGlobalMem");
    *available = *total - in_use;
    return cudaSuccess;
}
Error cudaPointerGetAttributes(struct cudaPointerAttributes *result, const void *pointer) {
    memset(result, 0, sizeof *result);
    result->type = kind_of(pointer);
    if (result->type != cudaMemoryTypeUnregistered) result->devicePointer = (void *)pointer;
    if (result->type == cudaMemoryTypeHost) result->hostPointer = (void *)pointer;
    return cudaSuccess;
}
Error cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char constants[1 << 20];
    *pointer = constants;
    return cudaSuccess;
}

// ---- copies: "copy <stream> <to><from> <bytes> <target> <source>", D device, P pinned, H host.
// What a device does with large memory of its own is not done: the host would take time for it.

enum { LARGE = 1 << 16 };

static Error copy(void *to, const void *from, size_t size, int stream, const char *name) {
    static const char letters[] = "HPDD";
    char target = letters[kind_of(to)], source = letters[kind_of(from)];
    LOG("%s %d %c%c %zu %zu %zu", name, stream, target, source, size, (size_t)to, (size_t)from);
    if (size < LARGE || target != 'D' || source != 'D') memmove(to, from, size);
    return cudaSuccess;
}
Error cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                      cudaStream_t stream) {
    return copy(to, from, size, number_of(stream), "copy");
}
Error cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    LOG("sync device");
    return copy(to, from, size, 0, "copy");
}
Error cudaMemcpyPeerAsync(void *to, int device, const void *from, int other, size_t size,
                          cudaStream_t stream) {
    return copy(to, from, size, number_of(stream), "copy");
}
Error cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    LOG("fill %d %zu %zu", number_of(stream), size, (size_t)pointer);
    if (size < LARGE) memset(pointer, value, size);
    return cudaSuccess;
}
Error cudaMemset(void *pointer, int value, size_t size) {
    return cudaMemsetAsync(pointer, value, size, NULL);
}

// ---- streams, events and captures. A stream that waits for an event of a capture joins it.

enum { MAX_STREAMS = 4096 };
typedef struct { long number; int capture; } Event;
static int num_streams = 1, num_captures, capture_of[MAX_STREAMS];
static long num_events;

Error cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    int number = __atomic_fetch_add(&num_streams, 1, __ATOMIC_SEQ_CST);
    if (number >= MAX_STREAMS) return cudaErrorMemoryAllocation;
    *stream = (cudaStream_t)(size_t)(FIRST_STREAM + 16 * number);
    LOG("stream %d %s", number, flags & cudaStreamNonBlocking ? "nonblocking" : "blocking");
    return cudaSuccess;
}
Error cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
Error cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
Error cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}
Error cudaStreamSynchronize(cudaStream_t stream) {
    LOG("sync stream %d", number_of(stream));
    return cudaSuccess;
}
Error cudaDeviceSynchronize(void) { LOG("sync device"); return cudaSuccess; }
Error cudaStreamQuery(cudaStream_t stream) {
    LOG("query stream %d", number_of(stream));
    return cudaSuccess;
}
Error cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    Event *event = (Event *)handle;
    int number = number_of(stream);
    LOG("wait %d %ld", number, event->number);
    if (event->capture) capture_of[number] = event->capture;
    return cudaSuccess;
}
Error cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    Event *event = calloc(1, sizeof *event);
    event->number = __atomic_add_fetch(&num_events, 1, __ATOMIC_SEQ_CST);
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}
Error cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
Error cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
Error cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    Event *event = (Event *)handle;
    event->capture = capture_of[number_of(stream)];
    LOG("record %d %ld", number_of(stream), event->number);
    return cudaSuccess;
}
Error cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
Error cudaEventQuery(cudaEvent_t event) {
    LOG("query event %ld", ((Event *)event)->number);
    return cudaSuccess;
}
Error cudaEventSynchronize(cudaEvent_t event) {
    LOG("sync event %ld", ((Event *)event)->number);
    return cudaSuccess;
}
Error cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1;
    return cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(cudaStream_t stream) {
    return capture_of[number_of(stream)] ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusNone;
}
Error cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = status_of(stream);
    return cudaSuccess;
}
Error cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                               unsigned long long *id, cudaGraph_t *graph,
                               const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                               size_t *count) {
    *status = status_of(stream);
    if (id) *id = capture_of[number_of(stream)];
    if (graph) *graph = (cudaGraph_t)&num_captures;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
Error cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    capture_of[number_of(stream)] = ++num_captures;
    LOG("begin %d %d", number_of(stream), mode);
    return cudaSuccess;
}
Error cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                    const cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges,
                                    size_t count, enum cudaStreamCaptureMode mode) {
    return cudaStreamBeginCapture(stream, mode);
}
Error cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    int capture = capture_of[number_of(stream)];
    for (int i = 0; i < MAX_STREAMS; i++)
        if (capture_of[i] == capture) capture_of[i] = 0;
    *graph = (cudaGraph_t)&num_captures;
    LOG("end %d", number_of(stream));
    return cudaSuccess;
}
Error cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode next = *mode;
    *mode = now;
    now = next;
    LOG("mode %d", now);
    return cudaSuccess;
}
Error cudaGraphInstantiateWithFlags(cudaGraphExec_t *run, cudaGraph_t graph,
                                    unsigned long long flags) {
    *run = (cudaGraphExec_t)&num_captures;
    return cudaSuccess;
}
Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes && *count) nodes[0] = (cudaGraphNode_t)&num_captures;
    *count = 1;
    return cudaSuccess;
}
Error cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
Error cudaGraphExecDestroy(cudaGraphExec_t run) { return cudaSuccess; }
Error cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t stream) {
    LOG("launch %d 1,1,1 1 0 graph", number_of(stream));
    return cudaSuccess;
}

// ---- kernels: "launch <stream> <grid> <threads> <shared memory> <name>"

enum { MAX_KERNELS = 1 << 19 };
static struct { const void *function; const char *name; } kernels[MAX_KERNELS];

static unsigned place_of(const void *function) {  // in an open hash table
    unsigned place = (unsigned)(((size_t)function >> 4) * 2654435761u) % MAX_KERNELS;
    while (kernels[place].function && kernels[place].function != function)
        place = (place + 1) % MAX_KERNELS;
    return place;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name,
                            int limit, uint3 *thread, uint3 *block, dim3 *threads, dim3 *grid,
                            int *warp) {
    pthread_mutex_lock(&lock);
    unsigned place = place_of(function);
    kernels[place].function = function;
    kernels[place].name = name;
    pthread_mutex_unlock(&lock);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}

static Error launch(const void *function, dim3 grid, dim3 block, size_t shared,
                    cudaStream_t stream) {
    const char *name = kernels[place_of(function)].name;
    LOG("launch %d %u,%u,%u %u %zu %s", number_of(stream), grid.x, grid.y, grid.z,
        block.x * block.y * block.z, shared, name ? name : "unknown");
    size_t most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int wrong = !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535;
    return wrong || shared > most ? cudaErrorInvalidConfiguration : cudaSuccess;
}
Error cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                       size_t shared, cudaStream_t stream) {
    return launch(function, grid, block, shared, stream);
}
Error __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
Error __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                         size_t shared, cudaStream_t stream) {
    return launch(kernel, grid, block, shared, stream);
}
Error cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **arguments) {
    return launch(function, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
Error cudaFuncGetAttributes(struct cudaFuncAttributes *result, const void *function) {
    memset(result, 0, sizeof *result);
    result->maxThreadsPerBlock = 1024;
    result->numRegs = 64;
    result->binaryVersion = result->ptxVersion = property("deviceVer") / 10;
    result->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return cudaSuccess;
}
Error cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value) {
    return value > attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) ? cudaErrorInvalidValue
                                                                      : cudaSuccess;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                             int threads, size_t shared,
                                                             unsigned flags) {
    *blocks = 1;
    return cudaSuccess;
}

// ---- the rest

Error cudaGetLastError(void) { return cudaSuccess; }
Error cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(Error error) { return "an error of the fake GPU"; }
const char *cudaGetErrorString(Error error) { return "an error of the fake GPU"; }
Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                       unsigned long long flags,
                                       enum cudaDriverEntryPointQueryResult *result) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *function = driver ? dlsym(driver, name) : NULL;
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
