"""What torch.distributed.pipelining's stages tell each other before the first step, made up from what this stage knows.

For stages that were all given ``input_args`` (``output_args`` or not), and whose outputs' gradients look like their outputs.
"""

import sys
from dataclasses import replace

from torch.distributed.pipelining import _utils


def locals_of(name):
    """Those of the function of this name, further up the stack. ValueError: there is none."""
    frame = sys._getframe()
    while frame.f_code.co_name != name:
        frame = frame.f_back
        if frame is None:
            raise ValueError(
                f"this is not what torch.distributed.pipelining's {name} receives; add a rule of its own before"
            )
    return frame.f_locals


def vote(call):
    """Whether no stage need ask for shapes (1): as if all had been given as much as the stages of this rank."""
    found = locals_of("_warmup_p2p")
    asks = [_utils.InferenceMode.needs_dynamic(stage._user_meta, found["has_backward"]) for stage in found["stages"]]
    call.outs[0].fill_(not any(asks))


def metadata(_):
    """What ``PipelineStage._recv_meta`` is about to receive."""
    found = locals_of("_recv_meta")
    stage, source = found["self"], found["src_stage"]
    if stage._user_meta.inputs is None and stage.stage_index:
        raise ValueError("this stage was given no input_args: write a hook that says what it receives, as in this file")
    if source < stage.stage_index:
        trains = locals_of("_forward_metadata_inference")["has_backward"]
        inputs = [replace(m, requires_grad=trains and m.dtype.is_floating_point) for m in stage._user_meta.inputs]
        return _utils._StageForwardMeta(tuple(inputs))
    return _utils._StageBackwardMeta(_utils._derive_grad_metas(stage._stage_meta.outputs))
