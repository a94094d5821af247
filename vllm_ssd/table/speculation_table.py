"""The file in shared memory that holds a speculation table: made by the engine core, opened by
target rank 0, by the draft and by tools."""

from __future__ import annotations

import mmap
import os
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from vllm_ssd.table.rundir import open_own
from vllm_ssd.table.schema import HEADER_DTYPE, MAGIC, VERSION, TableOwner, TableShape


class SpeculationTable:
    """Structured arrays over shared pages: header, target, draft and plan [1], slots
    [shape.slots]."""

    def __init__(self, path: Path, shape: TableShape, pages: mmap.mmap):
        self.path = path
        self.shape = shape
        self.pages = pages
        self.header, self.target, self.draft, self.plan, self.slots = (
            np.frombuffer(pages, part.dtype, part.count, part.offset)
            for part in shape.parts.values()
        )

    @property
    def owner(self) -> TableOwner:
        header = self.header[0]
        model, draft_server = (
            bytes(header[name]).decode(errors="ignore") for name in ("model", "draft_server")
        )
        return TableOwner(model, int(header["engine"]), int(header["pid"]), draft_server)

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
            size = shape.size
            os.posix_fallocate(fd, 0, size)
            pages = mmap.mmap(fd, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        table = cls(path, shape, pages)
        table.header["version"] = VERSION
        for name, value in (asdict(shape) | asdict(owner or TableOwner())).items():
            table.header[name] = value.encode() if isinstance(value, str) else value
        table.header["magic"] = MAGIC  # last: a reader sees a complete header or none
        return table

    @classmethod
    def without_draft(cls, shape: TableShape) -> SpeculationTable:
        """A table in this process's own memory, for an engine that has no files and no draft."""
        table = cls(Path(os.devnull), shape, mmap.mmap(-1, shape.size))
        table.plan["undrafted"] = True
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
        if len(pages) < HEADER_DTYPE.itemsize:
            raise ValueError(f"{path} is not a speculation table")
        header = np.frombuffer(pages, HEADER_DTYPE, 1)[0]
        if header["magic"] != MAGIC or header["version"] != VERSION:
            raise ValueError(
                f"{path} is not a speculation table of version {VERSION}: it belongs to another "
                "version of vllm-ssd"
            )
        shape = TableShape(*(int(header[field.name]) for field in fields(TableShape)))
        if len(pages) < shape.size:
            raise ValueError(f"{path} is truncated")
        return cls(path, shape, pages)
