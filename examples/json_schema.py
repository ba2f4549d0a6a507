"""Answers that follow a schema, through OpenAI's client: `python examples/json_schema.py [URL]`.

A grammar made of the Pydantic model masks the tokens, so that every answer that ends by itself can be parsed.
It needs a model with a chat template.
"""

import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1] if sys.argv[1:] else "http://localhost:8000/v1"


class Town(BaseModel):
    """What is asked of each town; the bounds hold too."""

    name: Annotated[str, Field(max_length=20)]
    coast: bool
    climate: Literal["cold", "mild", "hot"]
    harbours: Annotated[int, Field(ge=0, le=20)]


with OpenAI(base_url=URL, api_key="not-needed") as client:
    model = client.models.list().data[0].id
    for name in ("Oslo", "Vienna"):
        answer = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": f"Describe {name}."}],
            response_format=Town,
            max_tokens=100,
            temperature=0,
        )
        print(repr(answer.choices[0].message.parsed))
