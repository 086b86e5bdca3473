"""OpenVINO GenAI's continuous batching. Settings: model, dtype, threads, kv_gib, exports (a folder for converted models)."""

import hashlib
import os
import tempfile
from pathlib import Path

import clients
import numpy

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Engine:
    """The pipeline with keys and values in the model's own precision; by default it would store them in 8 bits."""

    def __init__(self, settings):
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        precision = _PRECISIONS[settings["dtype"]]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_gib"]
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = False  # the next round's prompts are the same ones
        folder = exported(settings["model"], Path(settings["exports"]))
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": settings["threads"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)
        self._handles = {}
        self._notes = (
            f"OpenVINO GenAI {openvino_genai.__version__}, weights and keys and values in {precision}, no prefix cache, "
            f"{settings['kv_gib']} GiB for keys and values, {scheduler.max_num_batched_tokens} tokens a step"
        )

    def notes(self):
        return self._notes

    def add(self, index, prompt, output_length):
        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_length
        config.do_sample = False
        config.ignore_eos = True
        tensor = self._openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self._handles[index] = self._pipeline.add_request(index, tensor, config)

    def step(self):
        self._pipeline.step()
        outputs = []
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                (output,) = handle.read().values()
                outputs.append((index, list(output.generated_ids)))
            if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                del self._handles[index]
        return outputs


def exported(model, exports):
    """The folder with the model converted, in float32; converted at first use."""
    source = Path(model)
    stamps = [f.stat().st_mtime_ns for f in sorted(source.glob("*.safetensors"))] if source.is_dir() else []
    name = f"{source.name}-{hashlib.sha256(repr((str(source), stamps)).encode()).hexdigest()[:12]}"
    if (exports / name).is_dir():  # it came there by a rename, so it is whole
        return exports / name
    from optimum.intel import OVModelForCausalLM

    exports.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=exports, ignore_cleanup_errors=True) as scratch:
        built = Path(scratch, name)
        OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(built)
        if any((source / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")) or not source.is_dir():
            _export_tokenizer(model, built)
        os.replace(built, exports / name)
    return exports / name


def _export_tokenizer(model, folder):
    """The pipeline looks for one beside the model, though the benchmark gives it token ids."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    pair = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for converted, name in zip(pair, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        openvino.save_model(converted, folder / name)


if __name__ == "__main__":
    clients.main(Engine)
