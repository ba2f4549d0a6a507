// Search without a server. A browser runs no worker for a page that was opened from disk, so a hidden frame stands in.
// The theme's search asks whether its parent has the name IFrameWorker.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    this.ready = new Promise((resolve) => {
      // Firefox replaces the frame's first document, so whatever is put in before this event is lost.
      frame.addEventListener("load", () => {
        this.scope = frame.contentWindow;
        this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = frame.contentDocument.createElement("script");
        script.addEventListener("load", resolve);
        script.src = url;
        frame.contentDocument.body.append(script);
      }, { once: true });
    });
    document.body.append(frame);
  }

  async postMessage(data) {
    await this.ready;
    this.scope.dispatchEvent(new MessageEvent("message", { data }));
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = IFrameWorker;
}
