"""The fault campaign: jobs that are killed, checkpoints that are damaged, disks that are full;
`python -m tests.faults`.
"""
