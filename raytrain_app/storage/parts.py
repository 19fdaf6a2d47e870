"""Checkpoints in parts: torch's distributed checkpoint, in safetensors, so that any cut of the model can read it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raytrain_app.errors import StorageError
from raytrain_app.state import Arrays


def pack_part(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> bytes:
    """The content of this worker's file: what it has of the tensors, and where in the whole ones that belongs.

    Args:
        tensors: by name, DTensors where they are cut; of what several workers have, one writes it.
        group: the workers of a replica, which all call it.

    Raises:
        RuntimeError: a worker is gone.
        StorageError: there is no room for the file on this machine.
    """
    with TemporaryDirectory(prefix="raytrain-") as folder:
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        try:
            save(dict(tensors), storage_writer=writer, process_group=group)
        except CheckpointException as error:
            raise StorageError(f"a checkpoint's part could not be made in {folder}: {error}") from error
        return b"".join(path.read_bytes() for path in Path(folder).glob("*.safetensors"))  # one, or none if it has nothing


def join_parts(files: Mapping[str, bytes]) -> Arrays:
    """The whole arrays from the files of all workers.

    Raises:
        ValueError: they do not fit together.
    """
    with TemporaryDirectory(prefix="raytrain-") as folder:
        for name, data in files.items():
            if data:
                Path(folder, name).write_bytes(data)
        try:
            found = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
            items = {name: item for name, item in found.items() if isinstance(item, TensorStorageMetadata)}
            tensors = {name: torch.empty(tuple(item.size), dtype=item.properties.dtype) for name, item in items.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it reads in one process, which is what is wanted
                load(tensors, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
        except (CheckpointException, SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(str(error)) from error
    return {name: tensor.numpy() for name, tensor in tensors.items()}
