"""Every algorithm through the engine: right sums, the same bits on all ranks, also with nodes."""

import threading

import numpy as np
import pytest

from mdas import _core

pytestmark = pytest.mark.timeout(120)

NODES = {"2": [0, 0], "5": [0] * 5, "2 + 2": [0, 0, 1, 1], "4 + 4": [0] * 4 + [1] * 4, "cyclic": [0, 1, 2, 0, 1, 2]}


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
@pytest.mark.parametrize("algorithm", _core.ALGORITHMS)
def test_allreduce(algorithm, nodes):
    size = len(nodes)
    engines = _core.loopback(size, _core.EngineSettings(algorithm=algorithm, timeout=60.0), nodes)
    generator = np.random.default_rng(0)
    inputs = {n: [generator.standard_normal(n).astype("float32") for _ in nodes] for n in (1, 7, 1000, 300_001)}
    outputs = {n: [np.empty(n, "float32") for _ in nodes] for n in inputs}

    def rank(engine):
        for n in inputs:
            source = _core.View.from_buffer(inputs[n][engine.rank], False)
            target = _core.View.from_buffer(outputs[n][engine.rank], True)
            engine.allreduce(0, source, target, op="average", blocking=True).wait(60)

    threads = [threading.Thread(target=rank, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.shutdown(10)
    for n, given in inputs.items():
        expected = np.mean([a.astype("float64") for a in given], axis=0)
        np.testing.assert_allclose(outputs[n][0], expected, atol=1e-6)
        for other in outputs[n][1:]:
            assert np.array_equal(outputs[n][0], other)
