/* Search where the site is opened from a file manager: browsers start no Worker from file://, so its script runs in a
   hidden frame. On a server the browser's own Worker is used. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const script = new URL(address, document.baseURI).href
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const load = url => new Promise((done, failed) => {
        const element = inside.document.createElement("script")
        element.src = url
        element.onload = done
        element.onerror = () => failed(new Error(`${url} cannot be loaded`))
        inside.document.body.append(element)
      })
      inside.importScripts = (...urls) =>
        urls.reduce((before, url) => before.then(() => load(new URL(url, script).href)), Promise.resolve())
      inside.postMessage = data => {
        const event = new MessageEvent("message", {data})
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.inside = inside
      this.ready = load(script)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
