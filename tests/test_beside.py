"""A thread beside a block ends with the block, however that ends."""

import threading

import pytest

from undercrank.beside import beside


def test_it_runs_while_the_block_does_and_is_gone_after_it() -> None:
    begun, ended = threading.Event(), []

    def run(over: threading.Event) -> None:
        begun.set()
        assert over.wait(60)
        ended.append(threading.current_thread().name)

    with pytest.raises(ZeroDivisionError), beside(run, name="aside"):
        assert begun.wait(60) and not ended
        raise ZeroDivisionError
    assert ended == ["aside"] and "aside" not in {thread.name for thread in threading.enumerate()}
