"""Whether a portable conversation can go on under the model that runs here: pure."""

from __future__ import annotations

from parkd.errors import ConversationUnfit
from parkd.portable.header import PortableHeader
from parkd.state import PLAIN_DTYPES, OtherState, Recut, StateLayout, recut_between


def recut_for(header: PortableHeader, layout: StateLayout, fingerprint: bytes, block_tokens: int) -> Recut | None:
    """How its parts become those of `layout`; None if they are those already. Raises ConversationUnfit."""
    if header.fingerprint != fingerprint:
        of = f" of {header.model}" if header.model else ""
        raise ConversationUnfit(
            f"It was computed by other weights, in another dtype or with another format of rows{of}: "
            f"{header.fingerprint.hex()[:12]}, and here is {fingerprint.hex()[:12]}. Serve the same model file with "
            "the same --dtype and --kv-cache-dtype as there."
        )
    if header.block_tokens != block_tokens:
        raise ConversationUnfit(
            f"It is cut in blocks of {header.block_tokens} tokens, and here they have {block_tokens}. Use the same "
            "version of parkd on both sides."
        )
    if header.layout.digest == layout.digest:
        return None
    try:
        return recut_between(header.layout, layout)
    except OtherState as error:
        raise ConversationUnfit(
            f"Its state is not that of the model here: {error}. Serve the same model on both sides, in one version of "
            "parkd."
        ) from None


def is_plain(layout: StateLayout) -> bool:
    """Whether any bytes are harmless as its state: numbers to calculate with, and no places in memory, nor anything
    that another program parses."""
    fields = [field for stage in layout.stages for field in (*stage.row_fields, *stage.fixed_fields)]
    return not layout.is_opaque and bool(fields) and all(field.dtype_name in PLAIN_DTYPES for field in fields)
