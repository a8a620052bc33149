"""For people: the commands of `cp-ring`, measurements, jobs of this machine and of Slurm."""
