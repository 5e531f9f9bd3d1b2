"""What stands before a record wherever it leaves memory: whose it is, and what shows that it is whole."""

from __future__ import annotations

import struct
import zlib

from engine.contracts.kv_store import RecordId

HEADER = struct.Struct("<4sHHIQ12s32s")
"""Magic, format, group, CRC-32 of the header's other fields and the record, length, the beginning of the namespace
where nothing else says it, and the block's key: 64 bytes."""
MAGIC, FORMAT = b"EKVR", 1


def header_of(each: RecordId, record: memoryview, namespace: bytes = b"") -> bytes:
    group, key = each
    blank = HEADER.pack(MAGIC, FORMAT, group, 0, len(record), namespace[:12], key)
    return HEADER.pack(MAGIC, FORMAT, group, zlib.crc32(record, zlib.crc32(blank)), len(record), namespace[:12], key)
