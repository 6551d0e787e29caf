"""Tests on vLLM, run by the interpreter of tools/vllm_env.py."""
