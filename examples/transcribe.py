"""Transcribe a recording of any length into subtitles.

Whisper decodes windows of thirty seconds. With `return_timestamps` its predicted timestamps set where the
next window begins; `return_segments` returns the segments with start and end. The output is an SRT file.

    python tools/models.py whisper-tiny.en speech
    python examples/transcribe.py
"""

import wave

import numpy as np
from transformers import AutoProcessor, WhisperForConditionalGeneration

import descant

MODEL = "models/whisper-tiny.en"  # or from the Hub: "openai/whisper-tiny.en", "openai/whisper-large-v3", ...
RECORDING = "models/speech/sonnet.wav"  # 16,000 samples a second, one channel


def timestamp(seconds: float) -> str:
    """A time in the format of subtitle files."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{thousandths:03}"


model = WhisperForConditionalGeneration.from_pretrained(MODEL)
processor = AutoProcessor.from_pretrained(MODEL)
with wave.open(RECORDING) as file:
    sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768

inputs = processor(
    sound, sampling_rate=16_000, truncation=False, return_attention_mask=True, return_tensors="pt"
)
out = descant.generate(model, **inputs, return_timestamps=True, return_segments=True)

for number, segment in enumerate(out.segments[0], 1):
    text = processor.decode(segment["tokens"], skip_special_tokens=True).strip()
    begin, end = timestamp(float(segment["start"])), timestamp(float(segment["end"]))
    print(f"{number}\n{begin} --> {end}\n{text}\n")
