"""What torch.distributed.pipelining's stages tell each other before the first step, made up from what this stage knows.

For stages that were given ``input_args``, and whose outputs' gradients look like their outputs.
"""

import sys

from torch.distributed.pipelining import _utils


def metadata(_):
    """What ``PipelineStage._recv_meta``, further up the stack, is about to receive."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_recv_meta":
        frame = frame.f_back
    stage, source = frame.f_locals["self"], frame.f_locals["src_stage"]
    if stage._user_meta.inputs is None and stage.stage_index:
        raise ValueError("shapes are known to stages that were given input_args only")
    if source < stage.stage_index:
        return _utils._StageForwardMeta(stage._user_meta.inputs)
    return _utils._StageBackwardMeta(_utils._derive_grad_metas(stage._stage_meta.outputs))
