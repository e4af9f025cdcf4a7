"""What a message begins with, and how large it and its parts may be."""

from __future__ import annotations

MAGIC = b"KOG"
PROTOCOL_VERSION = 4  # another one for whatever an end of the version before would read otherwise, a default too
MAX_PROMPT_IDS = 1 << 18  # token ids of one prompt, as words; as an array MAX_ARRAY
MAX_MESSAGE_BYTES = 4 * MAX_PROMPT_IDS + (1 << 17)  # all frames of a message together: the longest prompt, and a schema
MAX_ARRAY = 1 << 16  # longest array
MAX_TOKENS = 2**31 - 1  # of an answer
MAX_FIELDS = 48  # of one message
MAX_CONTAINERS = 64  # lists and maps in one message; stops a small message from growing into a large heap
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_SCHEMA_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 12
MAX_SALT_BYTES = 1 << 10
MAX_COUNT = 2**53  # counters and sizes: exact in every language's numbers
MAX_SECONDS = 1e9
MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")
LEAST_DEADLINE_S = 0.001
