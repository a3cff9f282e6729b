"""A renderer that does what a conversation's first message says, for servers that have to outlive it."""

import os
import time

from byte_renderer import ByteRenderer


class SlowRenderer(ByteRenderer):
    """`sleep 3` takes three seconds, `exit` ends its process, `raise` raises what no renderer may."""

    def render_ids(self, messages, tools=None, add_generation_prompt=True):
        word, _, rest = messages[0]["content"].partition(" ")
        if word == "sleep":
            time.sleep(float(rest.split()[0]))
        elif word == "exit":
            os._exit(3)
        elif word == "raise":
            raise KeyError(rest)
        return super().render_ids(messages, tools, add_generation_prompt)
