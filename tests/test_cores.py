"""A side of a run has all cores while the other one does not compute."""

import multiprocessing

from verbatim.cores import CoreShare


def test_a_side_has_its_share_while_the_other_one_computes(tmp_path):
    sampler, trainer = CoreShare(tmp_path / "cores", "sampler", 4), CoreShare(tmp_path / "cores", "trainer", 4)
    assert (sampler.num_threads, trainer.num_threads) == (4, 4)
    sampler.compute(True)
    assert (sampler.num_threads, trainer.num_threads) == (4, 2)
    trainer.compute(True)
    assert (sampler.num_threads, trainer.num_threads) == (2, 2)
    sampler.compute(False)
    assert (sampler.num_threads, trainer.num_threads) == (2, 4)


def test_there_is_always_a_thread(tmp_path):
    one, other = (CoreShare(tmp_path / "cores", side, 1) for side in ("sampler", "trainer"))
    one.compute(True)
    assert other.num_threads == 1


def _compute(path, begun, end):
    share = CoreShare(path, "trainer", 2)
    share.compute(True)
    begun.set()
    end.wait()
    share.compute(False)


def test_it_is_seen_from_another_process(tmp_path):
    context = multiprocessing.get_context("spawn")
    sampler, begun, end = CoreShare(tmp_path / "cores", "sampler", 2), context.Event(), context.Event()
    process = context.Process(target=_compute, args=(tmp_path / "cores", begun, end))
    process.start()
    assert begun.wait(60)
    assert sampler.num_threads == 1
    end.set()
    process.join(60)
    assert sampler.num_threads == 2


def test_a_side_that_starts_again_does_not_compute(tmp_path):
    sampler = CoreShare(tmp_path / "cores", "sampler", 2)
    CoreShare(tmp_path / "cores", "trainer", 2).compute(True)
    CoreShare(tmp_path / "cores", "trainer", 2)
    assert sampler.num_threads == 2
