"""A ComfyUI node that has a prompt written out by a Stretto server: copy this one file into ``ComfyUI/custom_nodes``.

It posts to ``/v1/chat/completions`` (of `stretto serve`, or any server that has it) with the standard library alone. Connect its output to the
text of a CLIPTextEncode. Where the server does not answer in words the prompt is not changed behind your back: the node fails and says why.
"""

import json
import urllib.error
import urllib.request

ASK = (
    "Rewrite the request below as one prompt for an image model. Keep every object, number, colour, place and quoted text exactly as asked; "
    "add style, lighting, composition, camera and background. Answer with the prompt only.\n\nRequest: {prompt}"
)


class StrettoEnhance:
    """STRING to STRING."""

    CATEGORY = "text"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("prompt",)
    FUNCTION = "enhance"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "prompt": ("STRING", {"multiline": True, "default": ""}),
                "server": ("STRING", {"default": "http://127.0.0.1:8000"}),
                "model": ("STRING", {"default": "", "tooltip": "empty: the one that the server serves"}),
                "max_tokens": ("INT", {"default": 256, "min": 1, "max": 8192}),
                "temperature": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 2.0, "step": 0.05}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**31 - 1, "control_after_generate": True}),
                "timeout_s": ("INT", {"default": 120, "min": 1, "max": 3600}),
            },
            "optional": {
                "subnet": ("STRING", {"default": "", "tooltip": "a preset of the server's network; empty: all of it"})
            },
        }

    def enhance(self, prompt, server, model, max_tokens, temperature, seed, timeout_s, subnet=""):
        """Raises `ValueError`: there is no prompt. `RuntimeError`: no answer in words."""
        if not prompt.strip():
            raise ValueError("Stretto: the prompt is empty")
        body = {
            "messages": [{"role": "user", "content": ASK.format(prompt=prompt)}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        if model:
            body["model"] = model
        if subnet:
            body["elastic"] = {"preset": subnet}
        url = f"{server.rstrip('/')}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                answer = json.load(reply)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"Stretto: {url} answers {error.code}: {error.read(200).decode(errors='replace')}"
            ) from None
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise RuntimeError(f"Stretto: {url}: {error}") from None
        if not isinstance(answer, str) or not answer.strip():
            raise RuntimeError(f"Stretto: {url} answered without a word")
        return (answer.strip(),)


NODE_CLASS_MAPPINGS = {"StrettoEnhance": StrettoEnhance}
NODE_DISPLAY_NAME_MAPPINGS = {"StrettoEnhance": "Stretto: enhance prompt"}
