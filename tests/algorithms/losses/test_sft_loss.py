import subprocess
import sys

import pytest
import torch

from verbatim.algorithms.losses import LOSSES, LossInputs, sft_loss


def test_loss_is_the_negative_log_likelihood_of_the_trained_tokens():
    nan = float("nan")
    trainer = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64).log().requires_grad_()
    missing = torch.full((3,), nan, dtype=torch.float64)
    data = LossInputs(trainer, missing, None, missing, torch.tensor([True, True, False]))
    loss = sft_loss(data).loss
    loss.backward()
    assert loss.item() == pytest.approx(2.0794415416798357, abs=1e-12)  # ln 8
    assert trainer.grad.tolist() == [-1.0, -1.0, 0.0]
    assert not LOSSES["sft"].needs_inference_logprobs


@pytest.mark.realtime
def test_importing_losses_imports_no_torch():
    code = "import sys, verbatim.algorithms.losses, verbatim.trainer.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
