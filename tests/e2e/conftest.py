"""These tests make runs, or play episodes, in their own process."""

from frozen import (
    collections_see_what_is_new,
    runs_do_not_look_for_garbage,
    what_a_module_leaves_is_collected,
)

__all__ = ["collections_see_what_is_new", "runs_do_not_look_for_garbage", "what_a_module_leaves_is_collected"]
