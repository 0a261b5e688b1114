import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.broadcast import Feed

pytestmark = pytest.mark.anyio


async def take(subscription, count):
    return [await anext(subscription) for _ in range(count)]


async def test_a_subscriber_receives_only_items_published_after_it_subscribed():
    feed = Feed()
    feed.publish("early")
    with feed.subscribe() as subscription:
        feed.publish("late")
        assert await anext(subscription) == "late"


async def test_publishing_from_another_thread_wakes_a_waiting_subscriber():
    feed = Feed()
    with feed.subscribe(limit=1000) as subscription:
        reader = asyncio.ensure_future(take(subscription, 1000))
        await asyncio.to_thread(lambda: [feed.publish(item) for item in range(1000)])
        assert await reader == list(range(1000))


async def test_subscribers_agree_on_the_order_of_several_publishers():
    feed = Feed()
    with feed.subscribe(limit=4000) as first, feed.subscribe(limit=4000) as second:
        threads = [
            threading.Thread(target=lambda name=name: [feed.publish((name, n)) for n in range(500)]) for name in "abcd"
        ]
        for thread in threads:
            thread.start()
        seen = await take(first, 2000)
        for thread in threads:
            thread.join()
        assert seen == await take(second, 2000)


@given(limit=st.integers(1, 8), count=st.integers(0, 30))
def test_a_slow_subscriber_keeps_the_newest_items_and_counts_the_dropped_ones(limit, count):
    async def scenario():
        feed = Feed()
        with feed.subscribe(limit) as subscription:
            for item in range(count):
                feed.publish(item)
            kept = min(limit, count)
            assert await take(subscription, kept) == list(range(count - kept, count))
            assert subscription.dropped == count - kept
        assert feed.subscribers == 0

    asyncio.run(scenario())


async def test_waiting_with_a_timeout_loses_nothing():
    feed = Feed()
    with feed.subscribe() as subscription:
        for item in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(subscription), 0.001)
            feed.publish(item)
            assert await anext(subscription) == item


async def test_an_item_published_while_the_reading_task_is_cancelled_is_not_lost():
    feed = Feed()
    with feed.subscribe() as subscription:
        reader = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        feed.publish("kept")
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader})
        assert reader.cancelled()
        assert await anext(subscription) == "kept"


async def test_closing_a_subscription_ends_its_iteration_and_removes_it_from_the_feed():
    feed = Feed()
    subscription = feed.subscribe()
    reader = asyncio.ensure_future(take(subscription, 1))
    await asyncio.sleep(0)
    subscription.close()
    subscription.close()
    with pytest.raises(StopAsyncIteration):
        await reader
    feed.publish("unread")
    assert feed.subscribers == 0


async def test_subscribers_of_a_closed_feed_read_the_remaining_items_but_no_new_ones():
    feed = Feed()
    subscription = feed.subscribe()
    feed.publish(1)
    feed.close()
    feed.publish(2)
    assert [item async for item in subscription] == [1]
    assert [item async for item in feed.subscribe()] == []


async def test_two_tasks_cannot_read_one_subscription():
    with Feed().subscribe() as subscription:
        reader = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await anext(subscription)
        reader.cancel()


async def test_a_limit_below_one_is_rejected():
    with pytest.raises(ValueError, match="limit is 0"):
        Feed().subscribe(0)


def test_publishing_works_after_the_event_loop_of_a_subscriber_was_closed():
    feed = Feed()

    async def subscribe_without_closing():
        subscription = feed.subscribe()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(subscription), 0.001)

    asyncio.run(subscribe_without_closing())
    feed.publish("first")
    feed.publish("second")
    assert feed.subscribers == 0


def test_subscribing_needs_a_running_loop():
    with pytest.raises(RuntimeError):
        Feed().subscribe()
