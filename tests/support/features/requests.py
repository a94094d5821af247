"""What a request may ask for, and in which forms its prompt may come."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.features.adapter import make_adapter
from tests.support.features.prompts import LONG, SHORT
from tests.support.features.results import completions, generate, refusal
from tests.support.features.sampling_parameters import parameters
from tests.support.harness import greedy


def sampling(llm: Any) -> dict[str, Any]:
    """Requests with all kinds of sampling parameters, beside each other: name -> result."""
    tokenizer = llm.get_tokenizer()

    def token(text: str) -> int:
        (found,) = tokenizer.encode(text, add_special_tokens=False)
        return found

    found: dict[str, Any] = {}
    for name, (prompt, settings) in parameters(token).items():
        found[name] = refusal(lambda p=prompt, s=settings: llm.enqueue(p, s, use_tqdm=False))
    accepted = [name for name, refused in found.items() if refused is None]
    outputs = llm.wait_for_completion(use_tqdm=False)
    return found | dict(zip(accepted, map(completions, outputs), strict=True))


def prompt_logprobs(llm: Any) -> Any:
    """One at a time: with LoRA enabled, vLLM on CPUs cannot do it in a batch."""
    settings = greedy(8, logprobs=0, prompt_logprobs=3)
    return [generate(llm, prompt, settings) for prompt in (SHORT, LONG)]


def seed(llm: Any) -> Any:
    """vLLM does not promise the same text with drafts and without, only a text, which may end."""
    drawn = greedy(16, seed=5, ignore_eos=True)
    drawn.temperature = 0.9
    found = generate(llm, [SHORT, SHORT], [drawn, greedy(16)])
    return [len(found[0][0]["tokens"]), found[1]]


def session(llm: Any) -> Any:
    """A prompt that comes in pieces, as in transcription: the text so far and the next piece are
    the next prompt."""
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine

    def send(prompt: str, max_tokens: int, resumable: bool) -> None:
        params = greedy(max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        request = engine.input_processor.process_inputs(
            "session", prompt, params, engine.get_supported_tasks(), resumable=resumable
        )
        request.external_req_id = "session"
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)

    found: list[list[int]] = []
    for prompt, length in ((SHORT, 1), (" the sea went to", 1), (" a city, where they", 24)):
        send(prompt, length, resumable=True)
        found.append([])
        while len(found[-1]) < length:
            for output in engine.step():
                found[-1] += output.outputs[0].token_ids
    send("end", 1, resumable=False)  # its text does not count
    return [found, engine.has_unfinished_requests()]


def lora(llm: Any) -> Any:
    """The target with an adapter and without, in one batch."""
    from vllm.lora.request import LoRARequest

    with TemporaryDirectory() as folder:
        make_adapter(Path(folder), Path(llm.llm_engine.model_config.model))
        request = LoRARequest("random", 1, folder)
        requests = [request, None, request, None]
        found = generate(llm, [SHORT, SHORT, LONG, LONG], greedy(16), lora_request=requests)
        loaded = llm.collective_rpc("list_loras")
    return {"with": found[::2], "without": found[1::2], "loaded": loaded}


def chat(llm: Any) -> Any:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    messages = [{"role": "user", "content": "Name three fruits."}]
    return [
        completions(o)
        for o in llm.chat(messages, greedy(24), chat_template=template, use_tqdm=False)
    ]


def beam_search(llm: Any) -> Any:
    from vllm.sampling_params import BeamSearchParams

    (found,) = llm.beam_search([{"prompt": SHORT}], BeamSearchParams(beam_width=2, max_tokens=8))
    return [(list(each.tokens), each.cum_logprob) for each in found.sequences]


def embed(llm: Any) -> Any:
    """Refused, as by any engine that generates."""
    return llm.embed([SHORT])
