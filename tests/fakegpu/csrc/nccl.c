// An NCCL that sends nothing. It logs communicators, groups and messages, with the stream of each:
// "nccl <stream> send|recv <communicator> <rank> <peer> <bytes> <address>". What is not here is a
// stub that the build generates.
#define __CUDA_FP16_H__  // nccl.h includes both and uses neither; they want headers of CCCL
#define __CUDA_BF16_H__
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "fake.h"

struct ncclComm { char name[NCCL_UNIQUE_ID_BYTES]; int rank, size; };
static __thread int depth;

static size_t bytes(size_t count, ncclDataType_t type) {
    static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * sizes[type];
}

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int number;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d.%d", (int)getpid(), number++);
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t error) { return "an error of the fake NCCL"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }

static ncclResult_t make(ncclComm_t *comm, const char *name, int size, int rank) {
    *comm = calloc(1, sizeof **comm);
    snprintf((*comm)->name, sizeof (*comm)->name, "%s", name);
    (*comm)->rank = rank;
    (*comm)->size = size;
    LOG("communicator %s %d %d", name, size, rank);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return make(comm, id.internal, size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    return make(comm, id.internal, size, rank);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
    *device = 0;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (!--depth) LOG("group");
    return ncclSuccess;
}
static ncclResult_t message(const char *kind, ncclComm_t comm, int peer, size_t size,
                            const void *data, cudaStream_t stream) {
    LOG("nccl %d %s %s %d %d %zu %zu", number_of(stream), kind, comm->name, comm->rank, peer, size,
        (size_t)data);
    if (!depth) LOG("group");
    return ncclSuccess;
}
ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return message("send", comm, peer, bytes(count, type), data, stream);
}
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return message("recv", comm, peer, bytes(count, type), data, stream);
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    return message("all", comm, comm->rank, bytes(count, type), to, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return message("all", comm, comm->rank, bytes(count * comm->size, type), to, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    return message("all", comm, comm->rank, bytes(count * comm->size, type), to, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
    return message("all", comm, comm->rank, bytes(count * comm->size, type), to, stream);
}
