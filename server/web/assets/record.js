// Record the microphone as a WAV file of 16 kHz, which every server reads.

import { clock } from "./dom.js";

const RATE = 16000; // samples per second, as speech models take

// Starts recording. `onTime` is called with the elapsed time, such as 0:07. The returned object's `stop`
// resolves to the file.
export async function record(onTime) {
  if (!navigator.mediaDevices) throw new Error("browsers record on https:// and localhost only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } }).catch(error => {
    throw new Error(`the microphone cannot be used: ${error.message}`);
  });
  const recorder = new MediaRecorder(stream);
  const chunks = [];
  recorder.ondataavailable = event => chunks.push(event.data);
  const started = performance.now();
  const showTime = () => onTime(clock((performance.now() - started) / 1000));
  showTime();
  const timer = setInterval(showTime, 500);
  recorder.start();
  return {
    async stop() {
      clearInterval(timer);
      await new Promise(resolve => {
        recorder.onstop = resolve;
        recorder.stop();
      });
      stream.getTracks().forEach(track => track.stop());
      const context = new OfflineAudioContext(1, 1, RATE); // decodes to its rate
      const audio = await context.decodeAudioData(await new Blob(chunks).arrayBuffer());
      return new File([wav(audio.getChannelData(0), RATE)], "recording.wav", { type: "audio/wav" });
    },
  };
}

// Returns a WAV file of one channel and 16 bits per sample.
export function wav(samples, rate) {
  const data = Int16Array.from(samples, sample => Math.max(-1, Math.min(1, sample)) * 32767);
  return new Blob([
    "RIFF", Uint32Array.of(36 + data.byteLength),
    "WAVEfmt ", Uint32Array.of(16), // size of this chunk
    Uint16Array.of(1, 1), // integer samples, channels
    Uint32Array.of(rate, 2 * rate), // samples and bytes per second
    Uint16Array.of(2, 16), // bytes of a sample of all channels, bits per sample
    "data", Uint32Array.of(data.byteLength), data,
  ], { type: "audio/wav" });
}
