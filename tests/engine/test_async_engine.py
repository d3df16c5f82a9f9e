"""The engine's thread and its asyncio callers: cancellation, crowds, draining, failure."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable

import pytest

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine, Closed, EngineFailed, RequestFailed, Stream
from stretto.engine.engine import Engine
from stretto.engine.grammar import GrammarState
from stretto.engine.request import Completion, Grammar, Request, TokenEvent
from tests.engine.engines import check_idle, engine, network, request

MODEL = network()


def with_service(work: Callable[[AsyncEngine, Engine], Awaitable[None]], **options: object) -> None:
    subject = engine(MODEL, **options)
    service = AsyncEngine(subject).start()
    try:
        asyncio.run(asyncio.wait_for(work(service, subject), 60))
    finally:
        service.close()


async def collect(service: AsyncEngine, name: str, **sampling: object) -> Completion:
    tokens: list[int] = []
    async for event in service.submit(request(name, (5, 6, 7), **sampling)):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        else:
            assert tuple(tokens) == event.tokens
            return event
    raise AssertionError("the stream ended without a completion")


def test_two_hundred_at_once() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        done = await asyncio.gather(*(collect(service, f"r{index}", max_tokens=6) for index in range(200)))
        assert len({completion.tokens for completion in done}) == 1
        check_idle(subject)

    with_service(work, max_batch=32)


async def settled(service: AsyncEngine) -> None:
    """Until the engine has nothing left to do."""
    while await service.call(lambda engine: engine.has_work):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["cancel", "close", "forget", "never read"])
def test_who_leaves_aborts(how: str) -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("x", (5, 6, 7), max_tokens=100))
        await stream.admitted()
        if how == "cancel":

            async def read(stream: Stream) -> None:
                async for _ in stream:
                    pass

            reader = asyncio.create_task(read(stream))
            while not subject.stats().num_running:
                await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        elif how == "close":
            await anext(stream)
            stream.close()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "forget":
            await anext(stream)
        del stream
        gc.collect()
        await settled(service)
        stats = await service.stats()
        assert stats.output_tokens < 100
        await service.call(check_idle)
        assert (await collect(service, "x", max_tokens=3)).finish_reason == "length"

    with_service(work)


def test_a_refusal_reaches_the_one_who_asked() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("x", (5, 999)))
        with pytest.raises(UserError, match="999"):
            await stream.admitted()
        with pytest.raises(UserError, match="999"):
            await anext(service.submit(request("y", (5, 999))))
        assert (await collect(service, "z")).finish_reason == "length"

    with_service(work)


def test_drain() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        readers = [asyncio.create_task(collect(service, f"r{index}", max_tokens=30)) for index in range(5)]
        while (await service.stats()).num_running < 5:
            await asyncio.sleep(0)
        await service.drain()
        assert not service.is_accepting and service.error is None
        with pytest.raises(Closed):
            service.submit(request("late", (5,)))
        assert [len((await reader).tokens) for reader in readers] == [30] * 5
        check_idle(subject)

    with_service(work)


def test_a_dead_engine_fails_everyone_with_the_reason() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        streams = [service.submit(request(f"r{index}", (5, 6), max_tokens=100)) for index in range(4)]
        await anext(streams[0])

        def broken(*_: object) -> None:
            raise RuntimeError("the device has gone")

        await service.call(lambda engine: setattr(engine._runner, "forward", broken))
        for stream in streams:
            with pytest.raises(EngineFailed, match="the device has gone"):
                async for _ in stream:
                    pass
        assert service.error is not None and not service.is_accepting
        with pytest.raises(EngineFailed):
            await anext(service.submit(request("late", (5,))))
        with pytest.raises(EngineFailed):
            await service.stats()
        await service.drain()

    with_service(work)


def test_a_step_that_hangs_ends_the_engine_with_stacks_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    let_go = threading.Event()

    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("x", (5, 6), max_tokens=100))
        await anext(stream)

        def hang_here(*_: object) -> None:
            let_go.wait()

        await service.call(lambda engine: setattr(engine._runner, "forward", hang_here))
        with pytest.raises(EngineFailed, match=r"no progress for 0\.5 s"):
            async for _ in stream:
                pass
        with pytest.raises(EngineFailed, match="no progress"):
            await service.stats()
        assert service.error is not None and not service.is_accepting
        assert "hang_here" in caplog.text

    try:
        with_service(work, max_step_s=0.5)  # closing it does not wait for the thread that hangs
    finally:
        let_go.set()


def test_an_engine_without_work_does_not_hang() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        await collect(service, "first", max_tokens=2)
        await asyncio.sleep(0.5)
        await collect(service, "second", max_tokens=2)

    with_service(work, max_step_s=0.3)


def test_weights_change_while_requests_run() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        reader = asyncio.create_task(collect(service, "x", max_tokens=120))
        while (await service.stats()).output_tokens == 0 and not subject._open:
            await asyncio.sleep(0)
        await service.load_weights(1, network(1).state_dict())
        with pytest.raises(UserError, match="checksum"):
            await service.load_weights(2, network(2).state_dict(), checksum="0")
        with pytest.raises(UserError, match="missing"):
            await service.load_weights(2, {})
        assert (await service.stats()).weight_version == 1
        assert (await reader).versions[-1] == 1

    subject = engine(network())
    service = AsyncEngine(subject).start()
    try:
        asyncio.run(asyncio.wait_for(work(service, subject), 60))
    finally:
        service.close()


def test_close_ends_what_is_open() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("x", (5, 6), max_tokens=100))
        await anext(stream)
        await asyncio.to_thread(service.close)
        events = [event async for event in stream]
        assert isinstance(events[-1], Completion) and events[-1].finish_reason == "abort"
        check_idle(subject)

    with_service(work)


def test_a_reader_that_fell_behind_gets_what_came_meanwhile_together() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("late", (5, 6, 7), max_tokens=6))
        await stream.admitted()
        await settled(service)
        batches = [events async for events in stream.batches()]
        assert len(batches) == 1
        assert [type(event) for event in batches[0]] == [TokenEvent] * 6 + [Completion]

    with_service(work)


def test_what_came_before_a_failure_is_still_read() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        stream = service.submit(request("broken", (5, 6, 7), max_tokens=6))
        await stream.admitted()
        await settled(service)
        channel = stream._channel
        kept = [channel.events.get_nowait() for _ in range(channel.events.qsize())][:2]
        for event in (*kept, EngineFailed("gone")):
            channel.events.put_nowait(event)
        seen: list[object] = []
        with pytest.raises(EngineFailed):
            async for events in stream.batches():
                seen += events
        assert seen == kept

    with_service(work)


def test_busy_time_is_that_of_steps_alone() -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        assert (await service.stats()).busy_s == 0.0
        await collect(service, "x", max_tokens=3)
        await settled(service)
        busy_s = (await service.stats()).busy_s
        assert busy_s > 0
        await asyncio.sleep(0.02)
        assert (await service.stats()).busy_s == busy_s, "nothing to do is not work"

    with_service(work)


class Gate:
    """Holds up whoever reads a grammar until it opens."""

    def __init__(self, subject: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self._grammar = threading.Event(), subject.grammar
        monkeypatch.setattr(subject, "grammar", self._held)

    def _held(self, request: Request) -> GrammarState | None:
        if request.sampling.grammar is not None:
            assert threading.current_thread().name.startswith("grammar"), "the engine's thread has other things to do"
            assert self.is_open.wait(30)
        return self._grammar(request)


WORD = Grammar(kind="regex", text="(the|cat)")


def test_a_grammar_is_read_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        gate = Gate(subject, monkeypatch)
        word = asyncio.create_task(collect(service, "word", grammar=WORD))
        left = service.submit(request("left", (5, 6), grammar=WORD))
        assert (await collect(service, "plain", max_tokens=20, ignore_eos=True)).finish_reason == "length"
        left.close()
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert not word.done()
        gate.is_open.set()
        assert (await word).text in ("the", "cat")
        await draining
        assert (await service.stats()).output_tokens == 20 + len(word.result().tokens), "who left was never begun"
        await service.call(check_idle)

    with_service(work, text=True)


def test_close_tells_those_whose_grammar_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: AsyncEngine, subject: Engine) -> None:
        gate = Gate(subject, monkeypatch)
        streams = [service.submit(request(f"r{index}", (5, 6), grammar=WORD)) for index in range(100)]
        await asyncio.to_thread(service.close)
        for stream in streams:
            with pytest.raises(EngineFailed, match="closed"):
                await anext(stream)
        gate.is_open.set()

    with_service(work, text=True)


def test_what_cannot_be_taken_is_told_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected or not, in reading the grammar or behind it; once as a library in Rust panics."""

    class Panic(BaseException):
        pass

    def broken(*_: object, **__: object) -> None:
        raise Panic

    async def work(service: AsyncEngine, subject: Engine) -> None:
        nested = Grammar(kind="json_schema", text='{"properties":{"a":' * 64 + "{}" + "}}" * 64)
        with pytest.raises(UserError, match="recursion limit"):
            await service.submit(request("nested", (5, 6), grammar=nested)).admitted()
        for name, asked in (("grammar", {"grammar": WORD}), ("add", {})):
            with monkeypatch.context() as patch:
                patch.setattr(subject, name, broken)
                with pytest.raises(RequestFailed, match="Panic"):
                    await service.submit(request("x", (5, 6), **asked)).admitted()
            assert (await collect(service, "x", max_tokens=3)).finish_reason == "length"
        assert service.error is None
        await service.drain()

    with_service(work, text=True)
