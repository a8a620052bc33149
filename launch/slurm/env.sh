# shellcheck shell=bash
# The environment of every rank on this cluster: network, NCCL, threads. train.sbatch sources it in each task, with the command of
# the rank as arguments. A variable that is already set keeps its value. Copy this file for your site: ENV_FILE=my_env.sh sbatch ...

# keep NAME VALUE: sets and exports NAME, unless NAME is already set or VALUE is empty.
keep() { [[ -n "${!1:-}" || -z "$2" ]] || export "$1=$2"; }

# The network device to the first other host of the job; loopback if there is no other host. HOSTS: the job's host names.
network_device() {
    local host address
    for host in ${HOSTS:-}; do
        if [[ "$host" != "${SLURMD_NODENAME:-$(hostname)}" ]]; then
            address="$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')"
            ip -o route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p'
            return
        fi
    done
    echo lo
}

# Before Blackwell, Megatron needs exactly one CUDA connection for tensor or context parallelism; with FSDP it rejects one.
cuda_connections() {
    local word capability
    for word in "$@"; do
        case $word in --use-torch-fsdp2 | --use-megatron-fsdp | --overlap-moe-expert-parallel-comm) return ;; esac
    done
    capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2>/dev/null)" || return 0
    (( ${capability%%.*} >= 10 )) || echo 1
}

# Gloo (checkpoints, CPU ranks) binds to the address of the host name, which is 127.0.1.1 on Debian. So name the device.
keep GLOO_SOCKET_IFNAME "$(network_device)"
# NCCL's first contact and its fallback without InfiniBand; a list of prefixes is allowed, ^ excludes: ^lo,docker
keep NCCL_SOCKET_IFNAME "$GLOO_SOCKET_IFNAME"
# Warnings only; INFO prints the rings, devices and transports that NCCL chose.
keep NCCL_DEBUG WARN
# InfiniBand: which adapters (ibstat lists them; leave out those of storage), for example mlx5_0,mlx5_1.
keep NCCL_IB_HCA ""
# RoCE: index of the address type that the switches carry, often 3; InfiniBand needs none.
keep NCCL_IB_GID_INDEX ""
# How long an adapter waits for an answer, 4.1 us * 2^n, before it tries again; 22 is 17 s, and helps on large fabrics.
keep NCCL_IB_TIMEOUT ""
# Direct transfers between GPU and adapter: PIX (one PCI switch) to SYS (anywhere); empty lets NCCL measure.
keep NCCL_NET_GDR_LEVEL ""
# A collective that fails on one rank ends all of them, so that the job can start again.
keep TORCH_NCCL_ASYNC_ERROR_HANDLING 1
keep CUDA_DEVICE_MAX_CONNECTIONS "$(cuda_connections "$@")"
# Ranks on one node share its cores.
keep OMP_NUM_THREADS "${CPUS_PER_RANK:-1}"
# Lines reach the log at once.
keep PYTHONUNBUFFERED 1
