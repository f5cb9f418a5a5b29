"""Runs as Slurm jobs: the script, its submission, and what Slurm says of a job afterwards.

On the login node nothing but the config is read, and sbatch called; the job does the rest (`launch.job`).
"""
