// Record the microphone as a WAV file of 16 kHz, which every server reads.

const RATE = 16000; // samples per second, as speech models take

// Starts recording. `onTime` is called with the elapsed time, such as 0:07. The returned object's `stop`
// resolves to the file.
export async function record(onTime) {
  if (!navigator.mediaDevices) throw new Error("browsers record on https:// and localhost only");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch(error => {
    throw new Error(`the microphone cannot be used: ${error.message}`);
  });
  const recorder = new MediaRecorder(stream);
  const chunks = [];
  recorder.ondataavailable = event => chunks.push(event.data);
  const started = performance.now();
  const clock = () => {
    const passed = Math.floor((performance.now() - started) / 1000);
    onTime(`${Math.floor(passed / 60)}:${String(passed % 60).padStart(2, "0")}`);
  };
  clock();
  const timer = setInterval(clock, 500);
  recorder.start();
  return {
    async stop() {
      clearInterval(timer);
      await new Promise(resolve => {
        recorder.onstop = resolve;
        recorder.stop();
      });
      stream.getTracks().forEach(track => track.stop());
      const samples = await decode(new Blob(chunks));
      return new File([wav(samples, RATE)], "recording.wav", { type: "audio/wav" });
    },
  };
}

// Returns one channel of samples from -1 to 1, at RATE.
async function decode(blob) {
  const context = new AudioContext();
  const audio = await context.decodeAudioData(await blob.arrayBuffer());
  context.close();
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(audio.duration * RATE)), RATE);
  const source = new AudioBufferSourceNode(offline, { buffer: audio });
  source.connect(offline.destination);
  source.start();
  return (await offline.startRendering()).getChannelData(0);
}

// Returns a WAV file of one channel and 16 bits per sample.
export function wav(samples, rate) {
  const bytes = new ArrayBuffer(44 + 2 * samples.length);
  const view = new DataView(bytes);
  const text = (offset, letters) => [...letters].forEach((letter, n) => view.setUint8(offset + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // size of this chunk
  view.setUint16(20, 1, true); // integer samples
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per sample
  view.setUint16(34, 16, true); // bits per sample
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, n) => {
    view.setInt16(44 + 2 * n, Math.max(-1, Math.min(1, sample)) * 32767, true);
  });
  return new Blob([bytes], { type: "audio/wav" });
}
