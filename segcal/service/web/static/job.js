// A job followed to its end: the server sends every change, and the page is asked for anew when there are results.
import { FINISHED, showJob } from "/static/live.js";

const root = document.getElementById("job");
if (!FINISHED.includes(root.dataset.state)) {
  const events = new EventSource(`/v1/jobs/${root.dataset.job}/events`);
  const show = (event) => showJob(root, JSON.parse(event.data));
  events.addEventListener("job", show);
  events.addEventListener("end", (event) => {
    show(event);
    events.close();
    location.reload();
  });
}
