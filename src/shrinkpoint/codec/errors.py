"""Maps exceptions that damaged bytes cause in decoders to the errors of `shrinkpoint.errors`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from shrinkpoint import _native
from shrinkpoint.errors import CorruptError, ShrinkpointError, TruncatedError
from shrinkpoint.guard import read_guard

_ADVICE = "restore an older checkpoint; `shrinkpoint verify` names what else is hit"


@contextmanager
def decode_errors(where: str) -> Iterator[None]:
    """Translate the exceptions of decoders that run inside this context.

    Args:
        where: the file and record that are decoded, for messages.

    Raises:
        CorruptError, TruncatedError: the bytes are damaged.
    """
    with read_guard(where):
        try:
            yield
        except ShrinkpointError:
            raise
        except _native.Truncated as error:
            raise TruncatedError(where, found=str(error), do=_ADVICE) from error
        except (_native.Corrupt, ValueError, LookupError, struct.error) as error:
            raise CorruptError(where, found=str(error), do=_ADVICE) from error
