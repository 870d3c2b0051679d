// Pages that are opened from a folder may start no worker; the search then runs in a hidden frame, which looks like one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.waiting = [];
      const page = this.inside.document;
      const base = page.createElement("base");
      base.href = new URL(".", new URL(url, location.href)).href;
      page.head.append(base);
      const loaded = (address) => new Promise((done, failed) => {
        const script = page.createElement("script");
        Object.assign(script, { src: address, onload: done, onerror: failed });
        page.body.append(script);
      });
      // A worker answers later, never from within the call that asks: so does the frame.
      this.inside.postMessage = (data) => setTimeout(() => this.heard(structuredClone(data)));
      this.inside.importScripts = (...addresses) => addresses.reduce((before, a) => before.then(() => loaded(a)), Promise.resolve());
      loaded(new URL(url, location.href).href).then(() => {
        for (const data of this.waiting.splice(0)) this.post(data);
        this.waiting = null;
      }, (error) => this.onerror?.(error));
    }
    heard(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    post(data) {
      setTimeout(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data: structuredClone(data) })));
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.post(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
