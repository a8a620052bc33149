#!/bin/bash
# node.sh NAME: one node of the cluster of with_slurm.sh, in its own network, process and host name spaces, until it is killed.
# nsenter, not `ip netns exec`: that mounts /sys anew, and slurmd needs /sys/fs/cgroup.
exec nsenter --net="/run/netns/$1" unshare --pid --uts --fork --kill-child --mount-proc \
    bash -c "hostname $1; slurmd -D >/dev/null 2>&1 & wait"
