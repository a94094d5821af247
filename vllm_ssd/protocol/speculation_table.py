"""The file in shared memory that holds a speculation table: made by the engine core, opened by
target rank 0, by the draft and by tools."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ssd.protocol.own_file import open_own
from vllm_ssd.protocol.schema import MAGIC, VERSION, TableOwner, TableShape


class SpeculationTable:
    """Structured arrays over shared pages: header, target, draft and plan [1], requests
    [shape.slots, 2], slots [shape.slots]."""

    def __init__(self, path: Path, shape: TableShape, pages: mmap.mmap, writable: bool):
        self.path = path
        self.shape = shape
        self.pages = pages
        offset = 0

        def view(dtype: np.dtype, count: int) -> NDArray:
            nonlocal offset
            offset = _next_line(offset)
            array = np.frombuffer(pages, dtype=dtype, count=count, offset=offset)
            offset += dtype.itemsize * count
            assert array.flags.writeable == writable
            return array

        self.header, self.target, self.draft, self.plan = (
            view(part, 1) for part in _before_requests(shape)
        )
        self.requests = view(shape.request_dtype(), shape.slots * 2).reshape(shape.slots, 2)
        self.slots = view(shape.slot_dtype(), shape.slots)

    @property
    def owner(self) -> TableOwner:
        header = self.header[0]
        model, draft_server = (
            bytes(header[name]).decode(errors="ignore") for name in ("model", "draft_server")
        )
        return TableOwner(model, int(header["engine"]), int(header["pid"]), draft_server)

    @staticmethod
    def requests_offset(shape: TableShape) -> int:
        """Bytes before the first request of a table of this shape."""
        offset = 0
        for part in _before_requests(shape):
            offset = _next_line(offset) + part.itemsize
        return _next_line(offset)

    @staticmethod
    def slots_offset(shape: TableShape) -> int:
        """Bytes before the first slot of a table of this shape."""
        requests = shape.slots * 2 * shape.request_dtype().itemsize
        return _next_line(SpeculationTable.requests_offset(shape) + requests)

    @staticmethod
    def size_of(shape: TableShape) -> int:
        """Bytes of a table of this shape."""
        return SpeculationTable.slots_offset(shape) + shape.slots * shape.slot_dtype().itemsize

    @classmethod
    def create(
        cls, path: Path, shape: TableShape, owner: TableOwner | None = None
    ) -> SpeculationTable:
        """Make a zeroed table that only its owner can read; ``FileExistsError`` if there is one.

        Reserves all pages now, and raises ``OSError`` (no space) if there is too little memory. A
        later shortage would be a fatal signal in the middle of a round.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            size = cls.size_of(shape)
            os.posix_fallocate(fd, 0, size)
            pages = mmap.mmap(fd, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        table = cls(path, shape, pages, writable=True)
        header = table.header
        header["version"], header["slots"], header["k"] = VERSION, shape.slots, shape.k
        header["branches"], header["tail"] = shape.branches, shape.tail
        header["top_m"] = shape.top_m
        if owner is not None:
            header["model"], header["engine"] = owner.model.encode(), owner.engine
            header["pid"], header["draft_server"] = owner.pid, owner.draft_server.encode()
        header["magic"] = MAGIC  # last: a reader sees a complete header or none
        return table

    @classmethod
    def open(cls, path: Path, writable: bool = True) -> SpeculationTable:
        """Open a table. Raises ``PermissionError`` if it is not this user's, ``OSError`` if it
        cannot be opened, and ``ValueError`` if it is not of this version."""
        fd = open_own(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            pages = mmap.mmap(fd, 0, access=access)
        finally:
            os.close(fd)
        header_dtype = TableShape(1, 1, 1).header_dtype()
        if len(pages) < header_dtype.itemsize:
            raise ValueError(f"{path} is not a speculation table")
        header = np.frombuffer(pages, dtype=header_dtype, count=1)[0]
        if header["magic"] != MAGIC or header["version"] != VERSION:
            raise ValueError(
                f"{path} is not a speculation table of version {VERSION}: it belongs to another "
                "version of vllm-ssd"
            )
        sizes = ("slots", "k", "branches", "tail", "top_m")
        shape = TableShape(*(int(header[name]) for name in sizes))
        if len(pages) < cls.size_of(shape):
            raise ValueError(f"{path} is truncated")
        return cls(path, shape, pages, writable)


def _before_requests(shape: TableShape) -> tuple[np.dtype, ...]:
    """The dtypes of header, target, draft and plan."""
    return shape.header_dtype(), shape.target_dtype(), shape.draft_dtype(), shape.plan_dtype()


def _next_line(offset: int) -> int:
    """The next multiple of 64 bytes: each cache line has one writer."""
    return -(-offset // 64) * 64
