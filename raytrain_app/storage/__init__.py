"""Where a run is kept: folders on disks and object stores, checkpoints, the run directory and TensorBoard files."""
