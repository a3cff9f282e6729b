"""A renderer that does what a conversation's first message says, for servers that have to outlive it."""

import os
import time
from pathlib import Path

from byte_renderer import ByteRenderer


class SlowRenderer(ByteRenderer):
    """`hang PATH` makes that file and never ends, `exit` ends its process, `raise` raises what no renderer may."""

    def render_ids(self, messages, tools=None, add_generation_prompt=True):
        word, _, rest = messages[0]["content"].partition(" ")
        if word == "hang":
            Path(rest.split()[0]).touch()
            time.sleep(10**6)
        elif word == "exit":
            os._exit(3)
        elif word == "raise":
            raise KeyError(rest)
        return super().render_ids(messages, tools, add_generation_prompt)
