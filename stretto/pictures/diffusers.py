"""Backend that paints with a pipeline of the diffusers library, loaded from a local folder.

An edit follows RePaint (arXiv 2201.09865) in its simplest form: after each step, the latents outside of the mask are set back to those of the base
picture with the noise level of that step. In the finished picture the pixels outside of the mask are copied from the base.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor

from stretto.base.errors import UserError, one_line
from stretto.pictures.backend import Lora, PaintRequest, check_request


class Diffusers:
    """The backend ``diffusers:FOLDER``."""

    def __init__(self, folder: Path | str, device: str | None = None) -> None:
        """
        Args:
            folder: Folder with ``model_index.json``.
            device: None: the accelerator where there is one, else the processor.

        Raises:
            UserError: The folder has no pipeline, or one that cannot be loaded or takes no prompt.
        """
        self._folder = Path(folder)
        if not (self._folder / "model_index.json").is_file():
            raise UserError(f"{self.name}: model_index.json: file not found; name the folder of a diffusers pipeline")
        diffusers_logging.set_verbosity_error()  # diffusers warns about a text encoder class that its own documentation uses
        diffusers_logging.disable_progress_bar()
        try:
            self._pipeline = DiffusionPipeline.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError, TypeError, ImportError) as error:
            problem = one_line(error, 200)
            raise UserError(
                f"{self.name}: not loadable ({type(error).__name__}: {problem}); check that the folder is complete"
            ) from None
        self._pipeline.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(self._pipeline.__call__).parameters
        if missing := [name for name in ("prompt", "height", "width", "generator") if name not in self._takes]:
            raise UserError(
                f"{self.name}: {type(self._pipeline).__name__} has no argument {missing[0]}; choose a text-to-image pipeline"
            )

    @property
    def name(self) -> str:
        return f"diffusers:{self._folder}"

    @property
    def multiple(self) -> int:
        return int(getattr(self._pipeline, "vae_scale_factor", 8))

    @property
    def edits(self) -> bool:
        return hasattr(self._pipeline, "_patchify_latents") and hasattr(self._pipeline.vae, "bn")

    def close(self) -> None:
        del self._pipeline

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        """As `Backend.paint`."""
        check_request(self, request)
        if request.controls:
            kind = type(self._pipeline).__name__
            raise UserError(
                f"{self.name}: control {request.controls[0].kind}: {kind} supports no ControlNet; leave it out, or use ComfyUI"
            )
        for what, given, name in (
            ("negative", request.negative, "negative_prompt"),
            ("steps", request.steps, "num_inference_steps"),
            ("guidance", request.guidance, "guidance_scale"),
        ):
            if given and name not in self._takes:
                raise UserError(
                    f"{self.name}: {what}: {type(self._pipeline).__name__} does not support it; leave it out"
                )
        steps = request.steps
        if steps is None and "num_inference_steps" in self._takes:
            steps = self._takes["num_inference_steps"].default
        arguments: dict[str, Any] = {
            "num_inference_steps": steps,
            "guidance_scale": request.guidance,
            "negative_prompt": request.negative,
            "use_pe": False,  # the caller has expanded the prompt already, or wants it as it is
        }
        keep = self._keeper(request) if request.base is not None else lambda step, latents: latents

        def after(_: Any, step: int, __: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
            if steps:
                tell((step + 1) / steps)
            return {"latents": keep(step, state["latents"])}

        with self._adapted(request.loras):
            output = self._pipeline(
                prompt=request.prompt,
                width=request.width,
                height=request.height,
                generator=torch.Generator().manual_seed(request.seed),
                callback_on_step_end=after,
                **{name: value for name, value in arguments.items() if name in self._takes and value is not None},
            )
        image: Image.Image = output.images[0].convert("RGB")
        if request.base is not None:
            assert request.mask is not None
            image = Image.composite(image, request.base.convert("RGB"), request.mask.convert("1"))
        return image

    @torch.no_grad()
    def _keeper(self, request: PaintRequest) -> Callable[[int, Tensor], Tensor]:
        """The function that sets latents outside of the mask back to those of the base picture, at the noise level after a step.

        Works on the latents of an ErnieImagePipeline: 2x2 patches, normalised by the batch-norm statistics of the autoencoder.
        """
        assert request.base is not None and request.mask is not None
        vae, pipeline = self._pipeline.vae, self._pipeline
        pixels_HWC = np.asarray(request.base.convert("RGB"), dtype=np.float32) / 127.5 - 1
        base_BCHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1)[None].to(vae.device, vae.dtype)
        latents_BCHW = pipeline._patchify_latents(vae.encode(base_BCHW).latent_dist.mode())
        mean, var = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        clean_BCHW = (latents_BCHW - mean) / torch.sqrt(var + 1e-5)
        noise_BCHW = torch.randn(clean_BCHW.shape, generator=torch.Generator().manual_seed(request.seed)).to(clean_BCHW)
        size = (request.width // self.multiple, request.height // self.multiple)
        # a token is repainted if the mask touches it at all
        shrunk = request.mask.convert("L").resize(size, Image.Resampling.BOX)
        free_HW = torch.from_numpy(np.asarray(shrunk) > 0).to(clean_BCHW.device)

        def keep(step: int, latents_BCHW: Tensor) -> Tensor:
            sigma = float(pipeline.scheduler.sigmas[step + 1])
            noisy_BCHW = (1 - sigma) * clean_BCHW + sigma * noise_BCHW
            return torch.where(free_HW, latents_BCHW, noisy_BCHW).to(latents_BCHW.dtype)

        return keep

    @contextmanager
    def _adapted(self, loras: tuple[Lora, ...]) -> Iterator[None]:
        """Context in which the pipeline has these adapters."""
        if not loras:
            yield
            return
        if not hasattr(self._pipeline, "load_lora_weights"):
            raise UserError(
                f"{self.name}: lora {loras[0].name}: {type(self._pipeline).__name__} supports no adapters; leave it out"
            )
        names = [f"lora_{number}" for number in range(len(loras))]
        try:
            for name, lora in zip(names, loras, strict=True):
                self._load(lora, name)
            self._pipeline.set_adapters(names, [lora.weight for lora in loras])
            yield
        finally:
            self._pipeline.unload_lora_weights()

    def _load(self, lora: Lora, adapter: str) -> None:
        where = f"{self.name}: lora {lora.name}"
        path = Path(lora.name)
        if not path.exists():
            raise UserError(f"{where}: file not found; name a safetensors file, or a folder that contains one")
        options: Mapping[str, Any] = {} if path.is_dir() else {"weight_name": path.name}
        try:
            self._pipeline.load_lora_weights(
                str(path if path.is_dir() else path.parent), adapter_name=adapter, **options
            )
        except Exception as error:  # about a dozen exception types of three libraries
            problem = one_line(error, 160)
            raise UserError(
                f"{where}: the adapter does not fit this model ({problem}); choose one trained for it"
            ) from None
        if adapter not in {name for names in self._pipeline.get_list_adapters().values() for name in names}:
            raise UserError(f"{where}: none of the adapter's weights are for this model; choose one trained for it")
