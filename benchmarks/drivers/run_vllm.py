"""vLLM in this process, on a CPU or, given `gpu_memory`, on a GPU. Settings: model, dtype, threads, kv_gib, compile."""

import os

import clients


class Engine:
    """vLLM's engine, driven step by step as its own offline `LLM.generate` does."""

    def __init__(self, settings):
        os.environ.update(
            OMP_NUM_THREADS=str(settings["threads"]),
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # as all peers: the system places the threads
            VLLM_CPU_KVCACHE_SPACE=str(settings["kv_gib"]),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # in a process of its own it would wait for work in a loop
            VLLM_NO_USAGE_STATS="1",
        )
        from vllm import EngineArgs, LLMEngine, SamplingParams, __version__
        from vllm.sampling_params import RequestOutputKind

        self._params, self._kind = SamplingParams, RequestOutputKind.DELTA
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                dtype=settings["dtype"],
                skip_tokenizer_init=True,  # token ids in, token ids out
                enable_prefix_caching=False,  # the next round's prompts are the same ones
                enforce_eager=not settings["compile"],
                disable_log_stats=True,
                max_model_len=settings["max_tokens"],
                max_num_seqs=256,
                **({"gpu_memory_utilization": settings["gpu_memory"]} if "gpu_memory" in settings else {}),
            )
        )
        mode = "compiled" if settings["compile"] else "eager"
        self._notes = f"vLLM {__version__}, {mode}, no prefix cache, {settings['kv_gib']} GiB for keys and values"

    def notes(self):
        return self._notes

    def add(self, index, prompt, output_length):
        params = self._params(
            temperature=0.0, max_tokens=output_length, ignore_eos=True, detokenize=False, output_kind=self._kind
        )
        self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def step(self):
        # An output's own id may carry a suffix that makes it unique.
        return [(int(out.request_id.split("-")[0]), list(out.outputs[0].token_ids)) for out in self._engine.step()]


if __name__ == "__main__":
    clients.main(Engine)
