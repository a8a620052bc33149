#!/bin/bash
# with_slurm.sh [-n NODES] [-d DIR] CMD...
# Runs CMD beside a real Slurm of several nodes on this machine (needs root). Daemons, jobs, networks and /etc/hosts live in one
# set of namespaces and end with CMD, however CMD or this script ends. DIR (kept) has slurm.conf, logs, and the nodes' pids in run/.
set -euo pipefail
nodes=2 dir=
while getopts n:d: option; do
    case $option in n) nodes=$OPTARG ;; d) dir=$OPTARG ;; *) exit 2 ;; esac
done
shift $((OPTIND - 1))
if [[ -z "${WITH_SLURM_INNER:-}" ]]; then
    dir=${dir:-$(mktemp -d)}
    exec env WITH_SLURM_INNER=1 unshare --mount --pid --net --uts --fork --kill-child --mount-proc \
        "$0" -n "$nodes" -d "$dir" "$@"
fi
unset WITH_SLURM_INNER
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
names=()
for ((i = 1; i <= nodes; i++)); do names+=("n$i"); done

mount -t tmpfs tmpfs /run # where `ip netns` keeps its names
mkdir -p "$dir"/{state,spool,log,run}
chmod 755 "$dir" "$dir"/*
hostname ctl
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
{
    echo 127.0.0.1 localhost
    echo 10.77.0.1 ctl
    for ((i = 1; i <= nodes; i++)); do echo "10.77.0.$((10 + i)) n$i"; done
} >"$dir/hosts"
mount --bind "$dir/hosts" /etc/hosts
dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none
chmod 400 "$dir/munge.key"

# cred_expire bounds how long a requeued job waits, and how long a busy machine may take to start a task; SLURMD_TIMEOUT how long a
# lost node goes unnoticed, and how long a busy machine's node may say nothing.
cat >"$dir/slurm.conf" <<END
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=20
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
PlugStackConfig=$dir/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=${SLURMD_TIMEOUT:-300}
KillWait=30
${EXTRA_CONF:-}
$(for name in "${names[@]}"; do echo "NodeName=$name CPUs=8 RealMemory=16000 State=UNKNOWN"; done)
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off State=UP
END
: >"$dir/plugstack.conf"
[[ -z "${TOPOLOGY:-}" ]] || echo "$TOPOLOGY" >"$dir/topology.conf"
export SLURM_CONF=$dir/slurm.conf SLURM_TEST_DIR=$dir

munged -F --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed" --num-threads=2 >/dev/null 2>&1 &
until [[ -S "$dir/run/munge.sock" ]]; do sleep 0.05; done
slurmctld -D >/dev/null 2>&1 &
controller=$!
for ((i = 1; i <= nodes; i++)); do
    ip netns add "n$i"
    ip link add "v$i" type veth peer name eth0 netns "n$i"
    ip link set "v$i" master br0 up
    ip -n "n$i" addr add "10.77.0.$((10 + i))/24" dev eth0
    ip -n "n$i" link set eth0 up
    ip -n "n$i" link set lo up
    mkdir -p "$dir/spool/n$i"
    "$here/node.sh" "n$i" &
    echo $! >"$dir/run/node.n$i.pid"
done
idle() { [[ "$(sinfo -h -N -p main -o %t 2>/dev/null | grep -c '^idle$')" == "$nodes" ]]; }
until idle; do
    kill -0 "$controller" || {
        tail -n 20 "$dir"/log/*
        exit 99
    }
    sleep 0.1
done
code=0
"$@" || code=$?
exit $code # the first process of its namespace: everything else ends here
