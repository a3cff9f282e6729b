"""`verbatim serve`: what is mistyped is said before a model is loaded; the rest is tested over a real process."""

from __future__ import annotations

import socket

import pytest

from verbatim.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "--prot", "80"], "has no option --prot"),
        (["model", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE: that variable is empty"),
        (["/no/such/model", "--uploads", "somewhere"], "--uploads needs a key"),
        (["/no/such/model", "--renderer", "none"], "/no/such/model"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_explained(arguments, said, capsys):
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.realtime
def test_a_port_that_is_taken_is_a_mistake_too(tmp_path, capsys):
    from e2e.tiny_runs import build_tiny_model

    model = build_tiny_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert (
            main(["serve", str(model), "--port", str(taken.getsockname()[1]), "--device", "cpu", "--dtype", "auto"])
            == 2
        )
    out, err = capsys.readouterr()
    assert "give another port" in err
    assert out.startswith("dtype float32: a tiny model, ")
