"""Pictures by the clients that people use; the others: `python -m tests.clients.run`."""

import asyncio
import base64

import anthropic
import httpx2  # what these clients are made of
import openai

from tests.server.pictures.pictured import app_of, chat, data_url, image, png, text

ONE = png(1)


def with_client(use, folder):
    async def scene():
        async with app_of(folder) as (app, _):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://app") as http:
                await asyncio.wait_for(use(http), 120)

    asyncio.run(scene())


def test_openai(folder):
    async def use(http):
        client = openai.AsyncOpenAI(base_url="http://app/v1", api_key="-", http_client=http)
        messages = chat(text("w1"), image(data_url(ONE)))["messages"]
        fixed = {"temperature": 0, "logit_bias": {3: -100}, "model": "tiny"}
        said = await client.chat.completions.create(messages=messages, max_tokens=3, **fixed)
        assert said.usage.prompt_tokens == 18 and said.choices[0].message.content
        pieces = await client.chat.completions.create(
            messages=messages, max_tokens=3, stream=True, **fixed
        )
        streamed = [piece.choices[0].delta.content or "" async for piece in pieces]
        assert "".join(streamed) == said.choices[0].message.content
        part = {"type": "input_image", "image_url": data_url(ONE), "detail": "low"}
        words = {"type": "input_text", "text": "w1"}
        response = await client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": [words, part]}],
            max_output_tokens=3,
            temperature=0,
            extra_body={"logit_bias": fixed["logit_bias"]},
        )
        assert response.output_text == said.choices[0].message.content

    with_client(use, folder)


def test_anthropic(folder):
    async def use(http):
        client = anthropic.AsyncAnthropic(base_url="http://app", api_key="-", http_client=http)
        source = {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(ONE).decode(),
        }
        messages = [
            {"role": "user", "content": [{"type": "image", "source": source}, text("w1")]},
        ]
        said = await client.messages.create(
            model="tiny", max_tokens=3, messages=messages, extra_body={"temperature": 0}
        )
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == 18
        counted = await client.messages.count_tokens(model="tiny", messages=messages)
        assert counted.input_tokens == 18
        async with client.messages.stream(
            model="tiny", max_tokens=3, messages=messages, extra_body={"temperature": 0}
        ) as stream:
            final = await stream.get_final_message()
        assert final.content[0].text == said.content[0].text

    with_client(use, folder)
