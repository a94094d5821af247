"""The clients that can put a server under load, by their names on the command line."""

from benchmarks.serving.clients.own import OwnClient
from benchmarks.serving.clients.task import Client
from benchmarks.serving.clients.vllm import VllmClient

CLIENTS: dict[str, Client] = {"vllm": VllmClient(), "own": OwnClient()}
