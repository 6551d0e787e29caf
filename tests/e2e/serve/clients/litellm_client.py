"""litellm against the server whose address is the argument; prints its answers as JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its list of prices is else downloaded

import litellm

litellm.telemetry = False
options = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0, "max_tokens": 8}
messages = [{"role": "user", "content": "Say hello."}]
whole = litellm.completion("openai/smol-draft", messages, num_retries=0, **options)
parts = litellm.completion("openai/smol-draft", messages, num_retries=0, stream=True, **options)
text = litellm.text_completion("Once upon a time", "text-completion-openai/smol-draft", **options)
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "stream": "".join(part.choices[0].delta.content or "" for part in parts),
            "text": text.choices[0].text,
            "num_tokens": whole.usage.total_tokens,
        }
    )
)
