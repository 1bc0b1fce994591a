"""Whole programs: the tests in Rust, a peer that is not ours, the command line, a training."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from host import Result, digest, job, scenario


@scenario
def device_tests() -> Result:
    """The tests in Rust that need a device; the machine has no cargo, but sees what was built outside."""
    words = [os.environ["MDAS_DEVICE_TESTS"], "verbs::tests", "--ignored", "--test-threads=1", "--nocapture"]
    done = subprocess.run([*words, "--skip", "foreign"], capture_output=True, text=True, timeout=280, check=False)
    return {"status": done.returncode, "text": done.stdout + done.stderr}


@scenario
def foreign_peer() -> Result:
    """The transport's queue pairs and a program over pyverbs, which the system's Python has."""
    words = [os.environ["MDAS_DEVICE_TESTS"], "verbs::tests::a_foreign", "--ignored", "--nocapture"]
    environment = os.environ | {
        "MDAS_FOREIGN_PEER": f"/usr/bin/python3 {Path(__file__).parents[1] / 'foreign_peer.py'}"
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env=environment)
    return {"status": done.returncode, "text": done.stdout + done.stderr}


@scenario
def doctor() -> Result:
    """What `mdas doctor` says."""
    words = [sys.executable, "-m", "mdas.cli", "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return {"text": done.stdout, "status": done.returncode}


@scenario
def training() -> Result:
    """The example of the README over verbs and over TCP: delayed, predicted by the sketch."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
    import fashion_data
    import fashion_mnist

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    fashion_mnist.arguments(parser)
    options = parser.parse_args(["--epochs", "1", "--batch", "8", "--warmup", "10", "--quiet"])
    with tempfile.TemporaryDirectory() as folder:
        whole = fashion_data.load(Path(folder))
    # Of its 60 000 pictures enough for 10 synchronous steps and 40 delayed ones.
    first = fashion_data.Split(whole.train.images[:800], whole.train.labels[:800])
    data = fashion_data.Data(first, whole.test, whole.source)
    out: Result = {"source": whole.source}
    for transport in ("verbs", "tcp"):
        done: list[int] = []
        with job(transport, timeout=120.0) as mdas:
            model = fashion_mnist.train(options, data, after_step=lambda step, model, done=done: done.append(step))
            mdas.barrier()
            state = model.state_dict()  # the base weights, with what is in flight applied
            out[transport] = digest(*(tensor.numpy() for tensor in state.values()))
            out[f"{transport} steps"] = len(done)
    return out
