// How a job's state is written into a page; the words are those of the server.
export const FINISHED = ["done", "failed", "cancelled"];
const WORDS = { queued: "waiting", running: "running", done: "done", failed: "failed", cancelled: "cancelled" };
const BADGES = { queued: "", running: "mixed", done: "better", failed: "worse", cancelled: "" };

export function showJob(root, job) {
  const part = (name) => root.querySelector(`[data-live="${name}"]`);
  const stopping = job.cancel_requested && job.state === "running";
  part("state").textContent = stopping ? "stopping" : WORDS[job.state];
  part("state").className = `badge ${BADGES[job.state]}`;
  part("message").textContent = job.message;
  const { stage, done, total } = job.progress;
  const bar = part("bar");
  bar.hidden = job.state !== "running";
  bar.querySelector("progress").max = total || 1;
  bar.querySelector("progress").value = total ? done : 0;
  part("stage").textContent = total ? `${stage} ${done} of ${total}` : stage || "starting";
  root.dataset.state = job.state;
}
