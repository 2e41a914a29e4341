"""Layers by themselves, as if a stack called them."""

from torch import nn

from adapterzoo.call import RecordedCall
from adapterzoo.runtime import CallContext, Default, Frame


def running(module=None, **given):
    """The context of a call of a stack.

    Args:
        module: the stack.
        **given: arguments of its forward, such as `attention_mask`.
    """
    context = CallContext(Default())
    stack = nn.Identity() if module is None else module
    context.stacks.append(Frame(RecordedCall("", given, None), None, stack))
    return context
