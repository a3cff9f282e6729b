"""A gateway over a script, and a client's connections."""

import aiohttp
import pytest
from scripted_gateway import gateway_over


@pytest.fixture
async def gateway():
    async with gateway_over() as gateway:
        yield gateway


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session
