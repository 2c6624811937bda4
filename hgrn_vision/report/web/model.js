// Loading the runtime and the model, and asking the worker that runs them.

const pending = new Map();
let worker = null;
let labels = [];
let loading = null;
let asked = 0;

function startWorker() {
  const address = URL.createObjectURL(new Blob([$("worker").textContent], { type: "text/javascript" }));
  worker = new Worker(address, { type: "module" });
  worker.onmessage = ({ data }) => {
    const { resolve, reject } = pending.get(data.id);
    pending.delete(data.id);
    if (data.error) reject(new Error(data.error));
    else resolve(data.result);
  };
  worker.onerror = () => {
    for (const { reject } of pending.values()) reject(new Error("it could not be started"));
    pending.clear();
  };
}

function ask(action, payload, transfer) {
  const id = asked++;
  return new Promise((resolve, reject) => {
    pending.set(id, { resolve, reject });
    worker.postMessage({ id, action, ...payload }, transfer);
  });
}

async function download(file, received) {
  const options = file.integrity ? { integrity: file.integrity } : {};
  const where = new URL(file.url, location.href);
  const response = await fetch(where, options).catch(() => {
    const other = where.host === location.host ? "" : ` from ${where.host}`;
    throw new Problem(`${file.what} could not be loaded${other}: there is no network, or the file is not the right one.`);
  });
  if (!response.ok) throw new Problem(`${file.what} could not be loaded: the server answered ${response.status}.`);
  const bytes = new Uint8Array(file.bytes);
  const reader = response.body.getReader();
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (length + value.length <= file.bytes) bytes.set(value, length);
    length += value.length;
    received(value.length);
  }
  if (length !== file.bytes) throw new Problem(`${file.what} did not arrive completely; reload the page.`);
  return bytes.buffer;
}

async function load() {
  if (location.protocol === "file:") {
    throw new Problem(
      "Browsers do not let a page from the disk read the files beside it. Serve the folder, for example with " +
        "“python -m http.server”, and open http://localhost:8000.",
    );
  }
  const files = [site.module, site.wasm, site.model];
  const total = files.reduce((sum, file) => sum + file.bytes, 0);
  let sum = 0;
  const received = (bytes) => {
    sum += bytes;
    $("progress").value = sum / total;
    const megabytes = (count) => (count / 1e6).toFixed(0);
    $("progress").setAttribute("aria-valuetext", `${megabytes(sum)} of ${megabytes(total)} MB`);
  };
  const names = fetch(site.labels).then((response) => response.json());
  const [module, wasm, model] = await Promise.all(files.map((file) => download(file, received)));
  labels = await names.catch(() => {
    throw new Problem("The class names could not be loaded.");
  });
  startWorker();
  await ask("load", { module, wasm, model, spec: site.spec }, [module, wasm, model]).catch((error) => {
    throw new Problem(`The model does not run in this browser: ${error.message}.`);
  });
}

function begin() {
  $("retry").hidden = true;
  $("progress").hidden = false;
  say("Loading the model…");
  loading = load();
  loading.then(
    () => {
      document.body.dataset.ready = "";
      $("progress").hidden = true;
      if ($("stage").dataset.shows !== "image") say("Ready for an image.");
    },
    (error) => {
      $("progress").hidden = true;
      $("retry").hidden = location.protocol === "file:";
      say("");
      complain(error);
    },
  );
}

begin();
