"""Rows for training: sources, checks, splits, order, and a reader as fast as memory."""

from raytrain_app.data.blocks import Blocks, Dataset, Split
from raytrain_app.data.load import check, load
from raytrain_app.data.order import epoch_order
from raytrain_app.data.reader import Reader

__all__ = ["Blocks", "Dataset", "Reader", "Split", "check", "epoch_order", "load"]
